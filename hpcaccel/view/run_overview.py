"""One run as a record: what ``status``, ``list`` and the summary at the end show, for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel.checkpoint_files import newest
from hpcaccel.core.run_dir import RunDir, read_lines
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.status import RunStatus
from hpcaccel.view.attempts import Attempt, count, current_step, read_attempts, total_steps
from hpcaccel.view.metrics_follower import Metrics
from hpcaccel.view.time_report import report

__all__ = ["Overview", "overview"]

LOSS = "loss"
"""The metric that is shown as the training's loss."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Everything about one run that fits on a screen. Times are seconds since the epoch."""

    run_id: str
    name: str
    path: str
    backend: str
    cluster: str
    job_id: str
    created: float
    state: str
    reason: str
    detail: str
    attempts: int
    step: int | None
    total_steps: int | None
    steps_lost: int
    first_loss: float | None
    last_loss: float | None
    checkpoint: str | None
    checkpoint_step: int | None
    slow_ranks: list[dict[str, Any]] = field(default_factory=list)
    """Ranks of the newest attempt that the others wait for: rank, node, and ratio to the median of all."""
    ettr: float | None = None
    """The share of all time that became training; None with fewer than two attempts."""
    goodput: float | None = None
    """The same, of the time with nodes."""
    error_class: str = ""
    """How the newest attempt failed, where the run has failed (docs/failures.md); and what can be done about it."""
    advice: str = ""
    values: dict[str, float] = field(default_factory=dict)
    metrics_warning: str = ""
    """Lines that the program appended to $HPCACCEL_METRICS and that are of no use."""
    history: list[Attempt] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    """What this task of an array has of its own."""
    tasks: list[Overview] = field(default_factory=list)
    """Of an array."""
    asked: float | None = None
    """When Slurm was asked for the state; None where it did not need to be."""
    note: str = ""
    """Why that is not newer."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict without NaN or infinity, which JSON does not have: they become None."""
        plain = _finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


def overview(run: RunDir, status: RunStatus) -> Overview:
    """Gather what the run directory says about a run whose ``status`` is known."""
    record = read_record(run)
    metrics = Metrics(run)
    metrics.read()
    attempts = read_attempts(run, metrics.logged)
    checkpoint = newest(run.checkpoints)
    checkpoint_step = checkpoint.step if checkpoint is not None else None
    counts = count(attempts, goes_on=not status.ended, newest_checkpoint=checkpoint_step)
    spent = report(run, status) if len(attempts) > 1 else None
    return Overview(
        run_id=run.run_id,
        name=record.name,
        path=str(run.path),
        backend=record.backend,
        cluster=record.cluster,
        job_id=record.job_ids[-1] if record.job_ids else "",
        created=record.created,
        state=status.state,
        reason=status.reason or "",
        detail=status.detail or "",
        attempts=status.attempts,
        step=current_step(attempts, metrics),
        total_steps=total_steps(attempts),
        steps_lost=sum(one.lost for one in counts),
        first_loss=metrics.first[LOSS][1] if LOSS in metrics.first else None,
        last_loss=metrics.last[LOSS][1] if LOSS in metrics.last else None,
        checkpoint=checkpoint.name if checkpoint is not None else None,
        checkpoint_step=checkpoint_step,
        slow_ranks=_slow_ranks(run, attempts),
        ettr=None if spent is None else spent.ettr,
        goodput=None if spent is None else spent.goodput,
        **_failure(status, attempts),
        values={name: value for name, (_, value) in metrics.last.items()},
        metrics_warning=metrics.warning,
        history=attempts,
        overrides=record.overrides,
        tasks=[overview(run.task(index), task) for index, task in enumerate(status.tasks)],
        asked=status.asked,
        note=status.note,
    )


def _failure(status: RunStatus, attempts: list[Attempt]) -> dict[str, str]:
    end = attempts[-1].end if attempts else None
    if end is None or not (status.state == "failed" or (status.state == "cancelled" and end.error_class)):
        return {}  # what somebody has cancelled himself has no cause to be shown
    return {"error_class": end.error_class or "", "advice": end.advice}


def _slow_ranks(run: RunDir, attempts: list[Attempt]) -> list[dict[str, Any]]:
    """As they were when that changed last."""
    if not attempts:
        return []
    lines = [line for line, _ in read_lines(run.stragglers(attempts[-1].number))]
    return list(lines[-1]["slow"]) if lines else []


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
