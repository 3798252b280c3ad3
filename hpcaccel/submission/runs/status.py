"""The status of runs, read from their directories, then from the shared squeue cache, then from the directories again.

A run whose ledger has a final end is not looked up in the queue. For other runs, Slurm's state comes from
``slurm.queue_cache`` and may be a minute old. If the ledger is newer, the ledger takes precedence.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache import Queue
from hpcaccel.slurm.states import JobState
from hpcaccel.submission.jobs.job_submission import is_open_for
from hpcaccel.submission.jobs.recovery import recover_now, submission_dir
from hpcaccel.submission.jobs.run_state import RunState, read_facts, read_worker_facts
from hpcaccel.submission.runs.pending_reasons import explain_reason
from hpcaccel.submission.runs.scheduler_state import SchedulerJob, job_of, query_processes, query_slurm

__all__ = ["ACTIVE", "RunStatus", "State", "array_status", "status", "statuses"]

State = Literal[
    "pending",  # in the queue, never started
    "starting",  # has its nodes; loads modules, runs setup, imports
    "running",
    "stopping",  # saving before it exits, or being ended by Slurm
    "requeued",  # in the queue again, after at least one attempt
    "completed",
    "pruned",  # a trial that its sweep's pruner ended early
    "failed",
    "cancelled",
    "paused",  # continues with `hpcaccel resume`
    "lost",  # the job ended without a final entry in the ledger
]

ACTIVE: frozenset[State] = frozenset({"pending", "starting", "running", "stopping", "requeued"})
"""States of a run that has not ended."""

_EXIT_CODES: dict[State, int] = {"completed": 0, "pruned": 0, "paused": 85, "cancelled": 130}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run or of an array of runs."""

    run_id: str
    name: str
    state: State
    job_id: str = ""
    reason: str = ""
    """Why the newest attempt ended (a ``records.Reason``), or why Slurm keeps the job waiting."""
    detail: str = ""
    """A sentence for the user."""
    attempts: int = 0
    restarts: int = 0
    """Number of attempts that were restarts in the same allocation; for a sweep, number of its workers' requeues."""
    tasks: tuple[RunStatus, ...] = ()
    """The tasks of an array or the workers of a sweep, by index."""
    asked: float | None = None
    """Time of the query to Slurm, in seconds since 1970; None without a query."""
    note: str = ""
    """A text for the user: why no newer state from Slurm is available."""
    partition: str = ""
    """Partition of the job, as squeue lists it."""
    estimated_start: float | None = None
    """When Slurm expects to start a pending job, in seconds since 1970; None without an estimate."""
    deadline: float | None = None
    """When the time limit of a running job ends, in seconds since 1970; None if unknown or unlimited."""

    @property
    def ended(self) -> bool:
        """Whether the run does not continue automatically: completed, pruned, failed, cancelled, lost, or paused."""
        return self.state not in ACTIVE

    @property
    def exit_code(self) -> int:
        """The exit code for the state: 0 if completed or pruned, 85 if paused, 130 if cancelled, else 1."""
        return _EXIT_CODES.get(self.state, 1)


def status(run: RunDir, slurm: Slurm | None = None, *, patient: bool = False) -> RunStatus:
    """The status of ``run``, or of all tasks if it is the directory of an array. See :func:`statuses`."""
    return statuses([run], slurm, patient=patient)[0]


def statuses(
    runs: Sequence[RunDir], slurm: Slurm | None = None, *, patient: bool = False, queue: Queue | None = None
) -> list[RunStatus]:
    """The status of each of ``runs``. Their jobs are queried together; interrupted submissions take further queries.

    Args:
        queue: used instead of ``slurm``.
        patient: for repeated calls: use cached states until they expire, even if a job has changed.

    Raises:
        RunDirectoryError: one of ``runs`` is not a run directory.
    """
    unknown = recover_now(map(submission_dir, runs), slurm=slurm)
    facts = [read_facts(run) for run in runs]
    tasks = [_task_facts(fact) for fact in facts]
    flat = [one for fact, own in zip(facts, tasks, strict=True) for one in (own or [fact])]
    found = _judge_all(flat, lambda: queue or Queue(slurm), patient=patient)
    for fact, own in zip(facts, tasks, strict=True):
        if (why := unknown.get(submission_dir(fact.run).path)) is not None:
            parts = [one for one in (own or [fact]) if is_open_for(submission_dir(one.run), one.run)]
            found |= {one.run.path: _submission_unfinished(one, why, found) for one in parts}
    return [
        array_status(fact, [found[task.run.path] for task in own]) if own else found[fact.run.path]
        for fact, own in zip(facts, tasks, strict=True)
    ]


def array_status(parent: RunState, tasks: Sequence[RunStatus]) -> RunStatus:
    """One status for an array: the most active state if any task is active, else the worst final state.

    An inactive sweep is completed if one of its workers is.
    """
    counts: dict[State, int] = {}
    for task in tasks:
        counts[task.state] = counts.get(task.state, 0) + 1
    order: tuple[State, ...] = (
        "running", "stopping", "starting", "requeued", "pending", "failed", "lost", "cancelled", "paused", "pruned",
        "completed",
    )  # fmt: skip
    state = next(one for one in order if one in counts)
    if parent.record.kind == "sweep" and state not in ACTIVE and "completed" in counts:
        state = "completed"  # a worker completes only if no trial is left
    return RunStatus(
        run_id=parent.run.run_id,
        name=parent.record.name,
        state=state,
        job_id=parent.job_id,
        reason=next((task.reason for task in tasks if task.state == state), ""),
        detail=_of_all(tasks, parent.job_id) or ", ".join(f"{counts[one]} {one}" for one in order if one in counts),
        attempts=sum(task.attempts for task in tasks),
        restarts=sum(task.restarts for task in tasks),
        tasks=tuple(tasks),
        asked=min((task.asked for task in tasks if task.asked is not None), default=None),
        note=next((task.note for task in tasks if task.note), ""),
        partition=next((task.partition for task in tasks if task.partition), ""),
        estimated_start=min((one.estimated_start for one in tasks if one.estimated_start is not None), default=None),
    )


def _of_all(tasks: Sequence[RunStatus], job_id: str) -> str:
    """For an array that has no job, the detail, which all of its tasks share; "" for other arrays."""
    return "" if job_id else next((task.detail for task in tasks if task.detail), "")


def _task_facts(fact: RunState) -> list[RunState]:
    size = fact.record.array_size
    if fact.record.kind == "sweep":
        sweep = SweepDir(fact.run.path)
        return [read_worker_facts(sweep.worker(index)) for index in range(size or 0)]
    return [] if size is None else [read_facts(fact.run.task(index)) for index in range(size)]


def _judge_all(facts: Sequence[RunState], queue: Callable[[], Queue], *, patient: bool) -> dict[Path, RunStatus]:
    open_ones = [fact for fact in facts if fact.settled is None]
    queued = query_slurm([fact for fact in open_ones if fact.record.backend == "slurm"], queue, patient=patient)
    found = {}
    for fact in facts:
        if fact.settled is not None:
            found[fact.run.path] = _settled(fact)
            continue
        job = job_of(fact, queued)
        if fact.record.backend == "local":
            job = query_processes(fact)
        if job.phase in ("ended", "gone"):
            # Read the ledger again: its last line may have been written since.
            fact = read_worker_facts(fact.run) if isinstance(fact.run, WorkerDir) else read_facts(fact.run)
        found[fact.run.path] = _settled(fact) if fact.settled is not None else _judge(fact, job)
    return found


def _submission_unfinished(fact: RunState, why: str, found: Mapping[Path, RunStatus]) -> RunStatus:
    """The status of a run whose submit or resume is unfinished or was interrupted, so that the job is unknown."""
    known = found[fact.run.path]
    return _status(fact, "pending", "", why) if known.ended else known


# -- state from the ledger and the job --------------------------------------------------------------------------------


def _settled(fact: RunState) -> RunStatus:
    end = fact.settled
    assert end is not None
    if end.decision == "pause":
        return _status(fact, "paused", end.reason, end.detail)
    state: State = end.reason if end.reason in ("completed", "pruned", "cancelled", "lost") else "failed"
    return _status(fact, state, end.reason, end.detail)


def _judge(fact: RunState, job: SchedulerJob) -> RunStatus:
    judged = _judged(fact, job)
    if fact.record.backend != "slurm":
        return judged
    detail = judged.detail
    if job.note and job.at and not judged.ended:
        as_of = f"as of {time.strftime('%H:%M:%S', time.localtime(job.at))}; {job.note}"
        detail = f"{detail} ({as_of})" if detail else as_of
    return replace(judged, detail=detail, asked=job.at or None, note=job.note, **_times(judged, job))


def _times(judged: RunStatus, job: SchedulerJob) -> dict[str, Any]:
    """Partition, expected start and time limit from squeue's line."""
    if job.entry is None or judged.ended:
        return {}
    if job.phase == "pending":
        return {"partition": job.entry.partition, "estimated_start": job.entry.start_time}
    return {"partition": job.entry.partition, "deadline": job.entry.end_time if job.entry.time_limit_seconds else None}


def _judged(fact: RunState, job: SchedulerJob) -> RunStatus:
    if job.phase == "unknown":
        return _status(fact, _by_directory(fact), "", job.words)
    if job.phase == "pending":
        why = explain_reason(job.words).replace("JOB", fact.job_id)
        return _status(fact, "requeued" if fact.attempts else "pending", job.words, why)
    if job.phase == "ending":
        return _status(fact, "stopping", "", "Slurm is ending the job")
    if job.phase == "running":
        return _running(fact, job)
    return _without_outcome(fact, job)


def _by_directory(fact: RunState) -> State:
    if fact.started is not None:
        return "stopping" if fact.stopping else "running"
    if fact.last_end is not None and fact.last_end.decision == "restart":
        return "starting"
    return "requeued" if fact.attempts else "pending"


def _running(fact: RunState, job: SchedulerJob) -> RunStatus:
    if fact.stopping or fact.asked is not None:
        reason = fact.asked.reason if fact.asked is not None else ""
        return _status(fact, "stopping", reason, "saving, then exiting")
    if job.state is JobState.SUSPENDED:
        return _status(fact, "running", "", "suspended by Slurm")
    return _status(fact, "starting" if fact.started is None else "running", "", "")


def _without_outcome(fact: RunState, job: SchedulerJob) -> RunStatus:
    """The status of a run that has no active job, and whose ledger does not say how it ended."""
    if _has_live_lease(fact):
        return _status(fact, "running", "", f"a running process on this host holds the run's lease: {fact.run.lease}")
    reported = "" if job.phase == "gone" else f"Slurm reports state {job.state.value}"
    cancelled = job.state is JobState.CANCELLED
    if fact.asked is not None and fact.asked.then == "cancel":
        return _status(fact, "cancelled", "cancelled", reported)
    if fact.asked is not None and fact.asked.then == "pause" and fact.started is None:
        return _status(fact, "paused", "stop", "stopped while waiting in the queue")
    if cancelled:
        return _status(fact, "cancelled", "cancelled", reported)
    if not fact.job_id and not fact.run.is_trial:
        how = f"hpcaccel {'sweep ' if fact.run.is_worker else ''}resume {submission_dir(fact.run).run_id}"
        detail = f"the submission was interrupted before a job was created: nothing is running. Submit it with `{how}`"
        return _status(fact, "failed", "failed", detail)
    if fact.started is not None or fact.attempts:
        detail = "the batch step ended without writing an outcome" + (f"; {reported}" if reported else "")
        return _status(fact, "lost", "lost", detail)
    state: State = "lost" if job.phase == "gone" and fact.record.backend == "slurm" else "failed"
    detail = f"the job ended before its first attempt; see {fact.run.slurm_log}" + (f"; {reported}" if reported else "")
    return _status(fact, state, "lost" if state == "lost" else "failed", detail)


def _has_live_lease(fact: RunState) -> bool:
    """Whether the run's lease is held by a running process of this host."""
    lease = None if fact.run.is_trial else read_json(fact.run.lease)
    return (
        lease is not None
        and lease["host"] == socket.gethostname()
        and process_start(lease["pid"]) == lease["pid_start"]
    )


def _status(fact: RunState, state: State, reason: str, detail: str) -> RunStatus:
    return RunStatus(
        run_id=fact.run.run_id,
        name=fact.record.name,
        state=state,
        job_id=fact.job_id,
        reason=reason,
        detail=detail,
        attempts=fact.attempts,
        restarts=fact.restarts,
    )
