"""Where a sweep stands: what ``sweep status`` shows, for people and as JSON. Neither Optuna nor pydantic is imported:
ten thousand trials take a fraction of a second."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel.core.records import EXIT_CONTINUED
from hpcaccel.core.run_dir import SweepDir, read_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.status import ACTIVE, RunStatus
from hpcaccel.sweeps.budget import Account, Budget
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.ownership import Notes
from hpcaccel.sweeps.results import Goal, Point, best, counts, pareto_front
from hpcaccel.sweeps.trial_attrs import FROM, is_surplus
from hpcaccel.sweeps.trial_result import DETAIL, ERROR_CLASS

__all__ = ["Failure", "Found", "Study", "SweepOverview", "sweep_overview"]


class Study:
    """The journal of a sweep with what its definition says about it, without the trials that never ran."""

    def __init__(self, sweep: SweepDir) -> None:
        document = read_json(sweep.sweep)
        if document is None:
            raise RunDirectoryError(f"{sweep.path} is no sweep's directory: it has no {sweep.sweep.name}")
        self.dir = sweep
        self.section: Mapping[str, Any] = document["sweep"]
        self.launch: Mapping[str, Any] = document["launch"]
        self.goal = Goal.of(self.section)
        self.record = StudyRecord(sweep.journal)
        self.notes = Notes(self.record)

    def read(self) -> Study:
        """Take in what is new."""
        self.notes.read()
        return self

    @property
    def trials(self) -> list[TrialRecord]:
        return [trial for trial in self.record.trials if not is_surplus(trial.user_attrs)]

    @property
    def ranks(self) -> int:
        """Of a worker's allocation."""
        return int(self.launch["nodes"]) * int(self.launch["ranks_per_node"])

    def workers(self) -> dict[int, int]:
        """The worker of each trial that somebody has begun."""
        return {number: claim.worker for number, claim in self.notes.claims.items()}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A point that was tried: the best one, or one of the front."""

    trial: int
    values: dict[str, float]
    """By metric; of several seeds the mean."""
    params: dict[str, Any]
    seeds: int
    """How many of its trials ran to their end."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Trials that failed in one way."""

    error_class: str
    count: int
    trial: int
    """The newest of them."""
    detail: str
    """What was said of it."""


@dataclass(frozen=True, kw_only=True)
class SweepOverview:
    """Everything about one sweep that fits on a screen. Times are seconds since the epoch."""

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
    modes: list[str]
    trials: dict[str, int]
    """How many are in each state."""
    again: int
    """Trials beside those that ``max_trials`` counts: failed ones once more, and the best ones with more to do."""
    max_trials: int | None
    best: Found | None
    front: list[Found]
    """With several metrics."""
    workers: dict[str, int]
    """How many are in each state."""
    gpu_hours: float
    """Of all allocations so far, idle time included; without GPUs, a rank counts as one."""
    max_gpu_hours: float | None
    seconds_left: float | None
    """Until ``max_trials`` or the budget is reached, as far as trials so far tell."""
    failures: list[Failure] = field(default_factory=list)
    asked: float | None = None
    """When Slurm was asked about the workers; None where it did not need to be."""
    note: str = ""
    """Why that is not newer."""

    @property
    def ended(self) -> bool:
        """Whether nothing follows by itself."""
        return self.state not in ACTIVE

    @property
    def exit_code(self) -> int:
        """0 completed, 85 paused, 130 cancelled, 1 anything else that has ended."""
        return {"completed": 0, "paused": EXIT_CONTINUED, "cancelled": 130}.get(self.state, 1)

    def to_json(self) -> dict[str, Any]:
        """A plain dict without NaN or infinity, which JSON does not have: they become None."""
        plain = _finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


def sweep_overview(study: Study, status: RunStatus, *, now: float | None = None) -> SweepOverview:
    """Gather what the directory of a sweep says, whose workers' ``status`` is known. ``study`` has been read."""
    sweep, section = study.dir, study.section
    record = read_record(sweep)
    trials, goal = study.trials, study.goal
    account = Account(sweep, ranks=study.ranks).read()
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
    """What the workers say, but where they have gone before what was begun was done, or have come to nothing."""
    if status.ended and study.notes.halted:
        return "failed"
    if status.state == "completed" and _has_nothing(study, trials, gpu_seconds):
        return "failed"
    if status.state != "completed" or all(trial.state != "running" for trial in trials):
        return status.state
    others = {worker.state for worker in status.tasks}
    return next((state for state in ("failed", "lost", "cancelled") if state in others), "paused")


def _has_nothing(study: Study, trials: Sequence[TrialRecord], gpu_seconds: float) -> bool:
    """Whether no trial ran to its end, and none will: the budget is used up, or all were tried."""
    if any(trial.state == "complete" for trial in trials):
        return False
    over = Budget(max_gpu_hours=study.section["max_gpu_hours"]).is_used_up(gpu_seconds)
    return over or (bool(trials) and all(trial.is_finished for trial in trials))


def _why(study: Study, state: str, status: RunStatus) -> str:
    """Why it stands where it stands; of workers that ended alike, one word for all."""
    if study.notes.halted and status.ended:
        return study.notes.halted
    most = study.section["max_trials"]
    if state == "completed" and most is not None and len(study.trials) >= most:
        return ""  # as it was to be
    if state == "failed" and status.state == "completed":
        told = sorted((worker.detail for worker in status.tasks), key=len)  # who ran a trial can tell the most
        return f"no trial ran to its end, so nothing was found: {told[-1] if told else ''}"
    ended_so = [worker for worker in status.tasks if worker.state == state] or status.tasks
    told = [worker.detail for worker in ended_so if worker.detail]
    return told[-1] if told else ""


def _found(point: Point, goal: Goal) -> Found:
    values = dict(zip(goal.metrics, point.values, strict=True))
    return Found(trial=point.trial.number, values=values, params=point.params, seeds=point.complete)


def _failures(trials: Iterable[TrialRecord]) -> list[Failure]:
    """By class, the commonest first."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.state == "failed":
            groups.setdefault(str(trial.user_attrs.get(ERROR_CLASS) or "failed"), []).append(trial)
    found = []
    for name, group in groups.items():
        newest = max(group, key=lambda trial: trial.ended or 0.0)
        detail = str(newest.user_attrs.get(DETAIL, ""))
        found.append(Failure(error_class=name, count=len(group), trial=newest.number, detail=detail))
    return sorted(found, key=lambda failure: -failure.count)


def _seconds_left(
    study: Study, trials: Sequence[TrialRecord], status: RunStatus, account: Account, gpu_seconds: float, now: float
) -> float | None:
    """What is left at the pace so far: the time that workers have taken for each trial that has ended."""
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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
