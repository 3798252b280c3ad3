"""State of a sweep as shown by ``sweep status``, also as JSON.

Optuna is not imported, so that ten thousand trials are read in a fraction of a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.finite_values import finite
from hpcaccel.core.launch_spec import launch_of
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.status import ACTIVE, RunStatus
from hpcaccel.sweeps.budget import Budget
from hpcaccel.sweeps.compute_account import ComputeAccount
from hpcaccel.sweeps.journal_notes import DETAIL, ERROR_CLASS, FROM, OwnershipNotes, is_surplus
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.results import Goal, Point, best, counts, pareto_front

__all__ = ["FailureCount", "Found", "Study", "SweepOverview", "SweepSummary", "sweep_overview"]


class Study:
    """A sweep's definition and journal. Discarded trials are left out."""

    def __init__(self, sweep: SweepDir) -> None:
        document = read_json(sweep.sweep)
        if document is None:
            raise RunDirectoryError(f"{sweep.path} is not the directory of a sweep: it has no {sweep.sweep.name}")
        self.dir = sweep
        self.section: Mapping[str, Any] = document["sweep"]
        self.launch = launch_of(document, source=sweep.sweep)
        self.goal = Goal.of(self.section)
        self.record = StudyRecord(sweep.journal)
        self.notes = OwnershipNotes(self.record)

    def read(self) -> Study:
        """Read new lines of the journal."""
        self.notes.read()
        return self

    @property
    def trials(self) -> list[TrialRecord]:
        return [trial for trial in self.record.trials if not is_surplus(trial.user_attrs)]

    @property
    def ranks(self) -> int:
        """Number of ranks in a worker's allocation."""
        return self.launch.ranks

    def workers(self) -> dict[int, int]:
        """The worker that owns each claimed trial, by the trial's number."""
        return {number: claim.worker for number, claim in self.notes.claims.items()}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A point with its result: the best one, or one of the Pareto front."""

    trial: int
    values: dict[str, float]
    """The mean over the point's complete trials, by metric."""
    params: dict[str, Any]
    seeds: int
    """Number of complete trials of the point."""


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Failed trials of one error class."""

    error_class: str
    count: int
    trial: int
    """The newest of these trials."""
    detail: str
    """Message of that trial."""


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """State of one sweep, without its results. Times are seconds since the epoch."""

    run_id: str
    name: str
    path: str
    backend: str
    cluster: str
    job_ids: list[str]
    created: float
    state: str
    detail: str
    method: str
    pruner: str
    metrics: list[str]
    trials: dict[str, int]
    """Number of trials in each state."""
    max_trials: int | None
    workers: dict[str, int]
    """Number of workers in each state."""
    gpu_hours: float
    """Usage of all allocations so far, including idle time; without GPUs, each rank counts as one GPU."""
    seconds_left: float | None
    """Estimated time until ``max_trials`` or the budget is reached; None if it cannot be estimated."""
    failures: list[FailureCount] = field(default_factory=list)
    """Failed trials by error class, the most frequent first."""
    asked: float | None = None
    """When Slurm was queried about the workers (the oldest time, if there are several); None if no query was needed."""
    note: str = ""
    """Why the state may be outdated; empty if it is current."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict without NaN or infinity, which JSON does not have: they become None."""
        plain = finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


@dataclass(frozen=True, kw_only=True)
class SweepOverview(SweepSummary):
    """State and best results of one sweep."""

    modes: list[str]
    again: int
    """Number of trials that continue an ended one; ``max_trials`` does not count them."""
    best: Found | None
    front: list[Found]
    """The Pareto front; empty with a single metric."""
    max_gpu_hours: float | None

    @property
    def ended(self) -> bool:
        """Whether the sweep has ended or is paused."""
        return self.state not in ACTIVE

    @property
    def exit_code(self) -> int:
        """0 if completed, 85 if paused, 130 if cancelled, else 1."""
        return {"completed": 0, "paused": EXIT_CONTINUED, "cancelled": 130}.get(self.state, 1)


def sweep_overview(study: Study, status: RunStatus, *, now: float | None = None) -> SweepOverview:
    """The overview of a sweep. ``study`` must be up to date; ``status`` is the status of its workers."""
    sweep, section = study.dir, study.section
    record = read_record(sweep)
    trials, goal = study.trials, study.goal
    account = ComputeAccount(sweep, ranks=study.ranks).read()
    now = time.time() if now is None else now
    gpu_seconds = account.gpu_seconds(now)
    leader = best(trials, goal)
    state = _state(study, trials, status, gpu_seconds)
    return SweepOverview(
        run_id=sweep.run_id,
        name=record.name,
        path=str(sweep.path),
        backend=record.backend,
        cluster=record.cluster,
        job_ids=record.job_ids,
        created=record.created,
        state=state,
        detail=_why(study, state, status),
        method=section["method"],
        pruner=next((name for name, settings in section["pruner"].items() if settings is not None), "none"),
        metrics=list(goal.metrics),
        modes=list(goal.modes),
        trials={str(state): count for state, count in counts(trials).items()},
        again=sum(FROM in trial.user_attrs for trial in trials),
        max_trials=section["max_trials"],
        best=None if leader is None else _found(leader, goal),
        front=[_found(point, goal) for point in pareto_front(trials, goal)] if len(goal.metrics) > 1 else [],
        workers=dict(Counter(worker.state for worker in status.tasks)),
        gpu_hours=gpu_seconds / 3600,
        max_gpu_hours=section["max_gpu_hours"],
        seconds_left=_seconds_left(study, trials, status, account, gpu_seconds, now),
        failures=_failures(trials),
        asked=status.asked,
        note=status.note,
    )


def _state(study: Study, trials: Sequence[TrialRecord], status: RunStatus, gpu_seconds: float) -> str:
    """The state of the sweep. It is that of the workers, unless the sweep stopped itself, the workers left trials
    unfinished, or no trial can complete."""
    if status.ended and study.notes.halted:
        return "failed"
    if status.state == "completed" and _has_nothing(study, trials, gpu_seconds):
        return "failed"
    if status.state != "completed" or all(trial.state != "running" for trial in trials):
        return status.state
    others = {worker.state for worker in status.tasks}
    return next((state for state in ("failed", "lost", "cancelled") if state in others), "paused")


def _has_nothing(study: Study, trials: Sequence[TrialRecord], gpu_seconds: float) -> bool:
    """Whether no trial is complete and none will be: the budget is used up, or all trials have ended."""
    if any(trial.state == "complete" for trial in trials):
        return False
    over = Budget(max_gpu_hours=study.section["max_gpu_hours"]).is_used_up(gpu_seconds)
    return over or (bool(trials) and all(trial.is_finished for trial in trials))


def _why(study: Study, state: str, status: RunStatus) -> str:
    """Details of the state: why the sweep stopped, or the message of one of the workers."""
    if study.notes.halted and status.ended:
        return study.notes.halted
    most = study.section["max_trials"]
    if state == "completed" and most is not None and len(study.trials) >= most:
        return ""  # the normal end
    if state == "failed" and status.state == "completed":
        details = sorted((worker.detail for worker in status.tasks), key=len)  # workers that ran trials have more
        return f"no trial has completed{f': {details[-1]}' if details else ''}"
    in_state = [worker for worker in status.tasks if worker.state == state] or status.tasks
    details = [worker.detail for worker in in_state if worker.detail]
    return details[-1] if details else ""


def _found(point: Point, goal: Goal) -> Found:
    values = dict(zip(goal.metrics, point.values, strict=True))
    return Found(trial=point.trial.number, values=values, params=point.params, seeds=point.complete)


def _failures(trials: Iterable[TrialRecord]) -> list[FailureCount]:
    """Failed trials by error class, the most frequent first."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.state == "failed":
            groups.setdefault(str(trial.user_attrs.get(ERROR_CLASS) or "failed"), []).append(trial)
    found = []
    for name, group in groups.items():
        newest = max(group, key=lambda trial: trial.ended or 0.0)
        detail = str(newest.user_attrs.get(DETAIL, ""))
        found.append(FailureCount(error_class=name, count=len(group), trial=newest.number, detail=detail))
    return sorted(found, key=lambda failure: -failure.count)


def _seconds_left(
    study: Study,
    trials: Sequence[TrialRecord],
    status: RunStatus,
    account: ComputeAccount,
    gpu_seconds: float,
    now: float,
) -> float | None:
    """Estimated time left, from the worker time per ended trial and the use of the budget so far."""
    at_work = sum(worker.state in ("running", "starting") for worker in status.tasks)
    ended = sum(trial.is_finished for trial in trials if FROM not in trial.user_attrs)
    held = sum(stay.seconds(now) for stays in account.held.values() for stay in stays)
    ends = []
    if at_work and ended and study.section["max_trials"] is not None:
        missing = max(0, study.section["max_trials"] - ended)
        ends.append(missing * held / ended / at_work)
    if at_work and gpu_seconds and held and study.section["max_gpu_hours"] is not None:
        each = gpu_seconds / held
        ends.append(max(0.0, study.section["max_gpu_hours"] * 3600 - gpu_seconds) / (each * at_work))
    return min(ends, default=None)
