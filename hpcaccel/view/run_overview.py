"""Overview of one run for ``status``, ``list`` and the final summary, also as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs.run_state import read_facts, read_record
from hpcaccel.submission.runs.attempts import Attempt, Metrics, count, current_step, read_attempts, total_steps
from hpcaccel.submission.runs.run_index import CachedOverview, look_at
from hpcaccel.submission.runs.status import RunStatus, statuses
from hpcaccel.view.time_report import report

__all__ = ["Overview", "RunRow", "listed", "overview"]

LOSS = "loss"
"""The metric that is shown as the training's loss."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """State of one run, as shown by ``status``. Times are seconds since the epoch."""

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
    """For each slow rank of the newest attempt: rank, node, and the ratio of the rank's own time to the median of all
    ranks."""
    ettr: float | None = None
    """Share of all time, except pauses, that was spent in training; None with fewer than two attempts."""
    goodput: float | None = None
    """Share of the time with nodes that was spent in training; None with fewer than two attempts."""
    error_class: str = ""
    """Class of the last failure (docs/failures.md); empty if the run has not failed."""
    advice: str = ""
    """What to do about the last failure; empty if the run has not failed."""
    values: dict[str, float] = field(default_factory=dict)
    metrics_warning: str = ""
    """Message about invalid lines in $HPCACCEL_METRICS."""
    history: list[Attempt] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    """The run's own settings, if it is a task of an array or a trial of a sweep."""
    tasks: list[Overview] = field(default_factory=list)
    """The tasks of an array; empty for other runs."""
    asked: float | None = None
    """When Slurm was queried for the state; None if no query was needed."""
    note: str = ""
    """Why the state may be outdated; empty if it is current."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict without NaN or infinity, which JSON does not have: they become None."""
        plain = _finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


def overview(run: RunDir, status: RunStatus) -> Overview:
    """Build the overview of a run from its ``status`` and its directory."""
    record = read_record(run)
    metrics = Metrics(run)
    metrics.read()
    attempts = read_attempts(run, metrics.logged)
    checkpoint = newest_saved(run, [attempt.end for attempt in attempts if attempt.end is not None])
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
        return {}  # for example, a run that was cancelled without a failure
    return {"error_class": end.error_class or "", "advice": end.advice}


def _slow_ranks(run: RunDir, attempts: list[Attempt]) -> list[dict[str, Any]]:
    """The slow ranks in the newest line of the last attempt's stragglers file."""
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


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run as shown by ``list``; ``document`` is its complete overview as JSON text."""

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
    def of(cls, run: Overview) -> RunRow:
        shown = {item.name: getattr(run, item.name) for item in fields(cls) if item.name != "document"}
        return cls(document=json.dumps(run.to_json(), ensure_ascii=False, allow_nan=False), **shown)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(self.document)
        return plain


_NAMES = tuple(item.name for item in fields(RunRow))


def listed(runs: Sequence[RunDir]) -> list[RunRow]:
    """The rows of ``runs``. The row of an ended run is cached until the run's directory changes."""
    cached = CachedOverview("list")
    found: dict[Path, RunRow] = {}
    for run in runs:
        value = cached.recall(run.path)
        if value is not None and value.keys() == set(_NAMES):
            found[run.path] = RunRow(**value)
    others = [run for run in runs if run.path not in found]
    looks = {run.path: look_at(run) for run in others}
    for run, now in zip(others, statuses(others), strict=True):
        shown = found[run.path] = RunRow.of(overview(run, now))
        if now.ended and not now.tasks and read_facts(run).settled is not None:
            cached.keep(looks[run.path], {name: getattr(shown, name) for name in _NAMES})
    cached.write()
    return [found[run.path] for run in runs]
