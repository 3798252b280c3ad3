"""The other side: which checkpoint of a run was the best, by what the run logged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError

__all__ = ["best_of"]

USUAL = ("val_loss", "eval_loss", "valid_loss", "loss")
"""Metrics that one looks at, in this order, where nobody says which."""


def best_of(run: RunDir, committed: Sequence[tuple[int, Path]], *, metric: str | None, largest: bool) -> Path:
    """The checkpoint whose newest value of ``metric``, of its own step or before, is the smallest (or largest).

    Raises:
        UserError: that was not logged before any checkpoint.
    """
    values: dict[str, dict[int, float]] = {}
    for line in Logged(run).read():
        for name, value in line.values.items():
            values.setdefault(name, {})[line.step] = value  # a step that was made again counts as made last
    chosen = metric or next((name for name in USUAL if name in values), None)
    logged = values.get(chosen or "", {})
    scores = {path: logged[max(before)] for step, path in committed if (before := [at for at in logged if at <= step])}
    if not scores:
        raise UserError(
            f"{run.run_id} has logged no {chosen or 'loss'} before a checkpoint, so that none is the best (logged: "
            f"{', '.join(sorted(values)) or 'nothing'}). Name a metric with --metric, or a step with --checkpoint"
        )
    return (max if largest else min)(scores, key=lambda path: scores[path])
