"""Many runs for ``list``: those that are over are read once, and again when something of them has changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.run_index import Remembered, look_at
from hpcaccel.submission.run_state import read_facts
from hpcaccel.submission.status import statuses
from hpcaccel.view.run_overview import Overview, overview

__all__ = ["Listed", "listed"]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What a list shows of one run; ``document`` is its whole overview, as JSON text."""

    run_id: str
    name: str
    job_id: str
    created: float
    state: str
    error_class: str
    attempts: int
    step: int | None
    total_steps: int | None
    last_loss: float | None
    overrides: dict[str, Any]
    asked: float | None
    note: str
    document: str

    @classmethod
    def of(cls, run: Overview) -> Listed:
        shown = {item.name: getattr(run, item.name) for item in fields(cls) if item.name != "document"}
        return cls(document=json.dumps(run.to_json(), ensure_ascii=False, allow_nan=False), **shown)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(self.document)
        return plain


_NAMES = tuple(item.name for item in fields(Listed))


def listed(runs: Sequence[RunDir]) -> list[Listed]:
    """Where each of ``runs`` stands."""
    remembered = Remembered("list")
    found: dict[Path, Listed] = {}
    for run in runs:
        value = remembered.recall(run.path)
        if value is not None and value.keys() == set(_NAMES):
            found[run.path] = Listed(**value)
    others = [run for run in runs if run.path not in found]
    looks = {run.path: look_at(run) for run in others}
    for run, now in zip(others, statuses(others), strict=True):
        shown = found[run.path] = Listed.of(overview(run, now))
        if now.ended and not now.tasks and read_facts(run).settled is not None:
            remembered.keep(looks[run.path], {name: getattr(shown, name) for name in _NAMES})
    remembered.write()
    return [found[run.path] for run in runs]
