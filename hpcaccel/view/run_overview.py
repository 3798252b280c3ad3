"""Overview of one run for ``status``, ``list`` and the final summary, also as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.finite_values import finite
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import WorkerDir
from hpcaccel.submission.jobs.run_state import read_facts, read_record, read_worker_facts
from hpcaccel.submission.runs.attempts import LOSS, Attempt, count, current_step, read_attempts, total_steps
from hpcaccel.submission.runs.run_index import SETTLING_SECONDS, CachedOverview, look_at
from hpcaccel.submission.runs.status import RunStatus, statuses
from hpcaccel.view.kept_readings import KeptRows, changed_at, metrics_of
from hpcaccel.view.life_bar import LifePart
from hpcaccel.view.present_state import present_state
from hpcaccel.view.rank_states import RankState, slow_ranks
from hpcaccel.view.time_report import report
from hpcaccel.view.usage import Usage
from hpcaccel.view.work_at_risk import AtRisk

__all__ = ["Overview", "RunRow", "listed", "overview"]


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
    """Share of all time, except pauses, that was spent in training; None before the first attempt."""
    goodput: float | None = None
    """Share of the time with nodes that was spent in training; None before the first attempt."""
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
    partition: str = ""
    """Partition of the job, or the one that the spec asks for."""
    nodes: list[str] = field(default_factory=list)
    """Nodes of the newest attempt."""
    queued_since: float | None = None
    """Since when the run has been waiting for nodes; None if it is not waiting."""
    started: float | None = None
    """Start of the newest attempt."""
    ended: float | None = None
    """End of the run; None while it is active, or if its end was not recorded."""
    estimated_start: float | None = None
    """When Slurm expects to start the pending job; None without an estimate."""
    deadline: float | None = None
    """When the time limit of the present job ends; None if unknown or unlimited."""
    time_left_seconds: float | None = None
    """Time to the deadline."""
    steps_per_second: float | None = None
    """Pace of a running run, from its newest logged lines."""
    tokens_per_second: float | None = None
    """Tokens per second as the running program logs them."""
    eta_seconds: float | None = None
    """Estimated time to the last step at the present pace; None if unknown or not running."""
    data_wait_share: float | None = None
    """Share of the newest attempt's step time, from 0 to 1, for which rank 0 waits for batches; None if unknown."""
    loss_tail: list[tuple[int, float]] = field(default_factory=list)
    """Steps and values of the newest losses, at most 100."""
    at_risk: AtRisk | None = None
    """What the job loses if it is preempted or fails now; None if no attempt is running."""
    ranks: list[RankState] = field(default_factory=list)
    """The ranks of the newest attempt."""
    life: list[LifePart] = field(default_factory=list)
    """The parts of the run's life, oldest first."""
    usage: Usage | None = None
    """Use of CPUs, memory and GPUs; None without samples."""
    hints: list[str] = field(default_factory=list)
    """Advice for the next spec."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict without NaN or infinity, which JSON does not have: they become None."""
        plain = finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


def overview(run: RunDir, status: RunStatus, *, now: float | None = None) -> Overview:
    """Build the overview of a run from its ``status`` and its directory.

    Metrics files are read once per process; later calls read only their new lines.
    """
    now = time.time() if now is None else now
    record = read_record(run)
    with metrics_of(run) as metrics:
        attempts = read_attempts(run, metrics.logged)
        checkpoint = newest_saved(run, [attempt.end for attempt in attempts if attempt.end is not None])
        checkpoint_step = checkpoint.step if checkpoint is not None else None
        counts = count(attempts, goes_on=not status.ended, newest_checkpoint=checkpoint_step)
        spent = report(run, status, now=now, attempts=attempts) if attempts and not status.tasks else None
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
            slow_ranks=slow_ranks(run, attempts[-1].number) if attempts else [],
            ettr=None if spent is None else spent.ettr,
            goodput=None if spent is None else spent.goodput,
            **_failure(status, attempts),
            values={name: value for name, (_, value) in metrics.last.items()},
            metrics_warning=metrics.warning,
            history=attempts,
            overrides=record.overrides,
            tasks=[overview(run.task(index), task, now=now) for index, task in enumerate(status.tasks)],
            asked=status.asked,
            note=status.note,
            loss_tail=list(metrics.losses),
            **present_state(run, record, status, attempts, metrics, checkpoint, counts, now=now),
        )


def _failure(status: RunStatus, attempts: list[Attempt]) -> dict[str, Any]:
    end = attempts[-1].end if attempts else None
    if end is None or not (status.state == "failed" or (status.state == "cancelled" and end.error_class)):
        return {}  # for example, a run that was cancelled without a failure
    return {"error_class": end.error_class or "", "advice": end.advice}


_NOT_LISTED = ("loss_tail", "ranks", "life", "usage", "hints")
"""Fields of an overview that lists leave out because of their size."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run as shown by ``list``; ``document`` is its overview as JSON text, without the fields in ``_NOT_LISTED``."""

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
    path: str
    backend: str
    cluster: str
    partition: str
    nodes: list[str]
    reason: str
    detail: str
    started: float | None
    ended: float | None
    estimated_start: float | None
    time_left_seconds: float | None
    steps_per_second: float | None
    eta_seconds: float | None
    goodput: float | None
    document: str

    @classmethod
    def of(cls, run: Overview) -> RunRow:
        shown = {item.name: getattr(run, item.name) for item in fields(cls) if item.name != "document"}
        plain = {name: value for name, value in run.to_json().items() if name not in _NOT_LISTED}
        return cls(document=json.dumps(plain, ensure_ascii=False, allow_nan=False), **shown)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(self.document)
        return plain


_NAMES = tuple(item.name for item in fields(RunRow))


PAGE_RUNS = 1000
"""Up to this number of runs, a page of the service parses only their lines of the cache file."""


def listed(runs: Sequence[RunDir], *, patient: bool = False) -> list[RunRow]:
    """The rows of ``runs``. The row of an ended run is cached until the run's directory changes.

    Args:
        patient: for repeated calls; see :func:`hpcaccel.submission.runs.status.statuses`. Rows that this process has
            read are checked in turn, all of them within a minute or ten calls; a resume of a run is noticed at once.
    """
    with _KEPT_ROWS.lock:
        found = _KEPT_ROWS.known(runs) if patient else {}
        left = [run for run in runs if run.path not in found]
        # Lines of the cache file are for runs that this process has not read yet: reading the file takes long.
        new = [run for run in left if not (patient and _KEPT_ROWS.has_seen(run))]
        few = [run.path for run in new] if patient and len(new) <= PAGE_RUNS else None
        cached = CachedOverview("list", only=few) if new else None
        for run in new:
            changed, value = changed_at(run), cached.recall(run.path) if cached is not None else None
            if value is not None and value.keys() == set(_NAMES):
                found[run.path] = RunRow(**value)
                _KEPT_ROWS.keep(run, found[run.path], changed)
        others = [run for run in left if run.path not in found]
        before = [(changed_at(run), look_at(run)) for run in others]
        for run, (changed, look), now in zip(others, before, statuses(others, patient=patient), strict=True):
            shown = found[run.path] = RunRow.of(overview(run, now))
            if now.tasks:
                is_settled = now.ended and _tasks_are_settled(run, len(now.tasks))
            else:
                is_over = now.ended and read_facts(run).settled is not None
                is_settled = is_over and look is not None and look.is_settled
                if is_over and cached is not None:
                    cached.keep(look, {name: getattr(shown, name) for name in _NAMES})
            _KEPT_ROWS.keep(run, shown if is_settled else None, changed)
        if cached is not None:
            cached.write()
        return [found[run.path] for run in runs]


def _tasks_are_settled(run: RunDir, count: int) -> bool:
    """Whether all tasks of an array, or workers of a sweep, have ended some time ago according to their files."""
    for index in range(count):
        task = run.task(index)
        end = (read_worker_facts(task) if isinstance(task, WorkerDir) else read_facts(task)).settled
        if end is None or end.time > time.time() - SETTLING_SECONDS:
            return False
    return True


_KEPT_ROWS: KeptRows[RunRow] = KeptRows()
