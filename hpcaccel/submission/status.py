"""Where a run stands: its own directory first, then the shared answer of squeue, then its directory again.

A run whose ledger says that nothing follows is never asked about. What Slurm says of all others comes from
``slurm.queue``, and may be a minute old: where the ledger tells of something later, the ledger counts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir, SweepDir, WorkerDir, read_json
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache import Queue
from hpcaccel.slurm.states import JobState
from hpcaccel.submission.explaining_reasons import in_words
from hpcaccel.submission.idempotent_resume import is_open_for
from hpcaccel.submission.recovery import owner, recover_now
from hpcaccel.submission.run_state import Facts, read_facts, read_worker_facts
from hpcaccel.submission.scheduler_state import Job, ask_processes, ask_slurm, job_of

__all__ = ["ACTIVE", "RunStatus", "State", "array_status", "status", "statuses"]

State = Literal[
    "pending",  # in the queue, never started
    "starting",  # has its nodes; modules, setup, imports
    "running",
    "stopping",  # asked to save and leave, or being taken down
    "requeued",  # in the queue again, after at least one attempt
    "completed",
    "pruned",  # a trial that its sweep has seen enough of
    "failed",
    "cancelled",
    "paused",  # goes on with `hpcaccel resume`
    "lost",  # ended without a word
]

ACTIVE: frozenset[State] = frozenset({"pending", "starting", "running", "stopping", "requeued"})
"""States of a run that something is still going to happen to by itself."""

_EXIT_CODES: dict[State, int] = {"completed": 0, "pruned": 0, "paused": 85, "cancelled": 130}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where one run, or one array of runs, stands."""

    run_id: str
    name: str
    state: State
    job_id: str = ""
    reason: str = ""
    """Why the newest attempt ended (a ``records.Reason``), or why Slurm keeps the job waiting."""
    detail: str = ""
    """One sentence for people."""
    attempts: int = 0
    restarts: int = 0
    """How many attempts followed another inside the same allocation."""
    tasks: tuple[RunStatus, ...] = ()
    """Of an array, by index."""
    asked: float | None = None
    """When Slurm was asked for what is shown, in seconds since the epoch; None where the directory says it all."""
    note: str = ""
    """Why that is not newer, for people."""

    @property
    def ended(self) -> bool:
        """True when nothing follows by itself: completed, pruned, failed, cancelled, lost, or paused."""
        return self.state not in ACTIVE

    @property
    def exit_code(self) -> int:
        """0 completed or pruned, 85 paused, 130 cancelled, 1 anything else that has ended."""
        return _EXIT_CODES.get(self.state, 1)


def status(run: RunDir, slurm: Slurm | None = None, *, patient: bool = False) -> RunStatus:
    """Where ``run`` stands; for the parent folder of an array its tasks taken together. As :func:`statuses`."""
    return statuses([run], slurm, patient=patient)[0]


def statuses(
    runs: Sequence[RunDir], slurm: Slurm | None = None, *, patient: bool = False, queue: Queue | None = None
) -> list[RunStatus]:
    """Where each of ``runs`` stands, with one question to Slurm for all of them at most.

    Args:
        queue: asks instead of ``slurm``.
        patient: for who looks again and again: an answer serves until it is too old, whatever was changed meanwhile.

    Raises:
        RunDirectoryError: one of them is no run directory.
    """
    unknown = recover_now(map(owner, runs), slurm=slurm)
    facts = [read_facts(run) for run in runs]
    tasks = [_task_facts(fact) for fact in facts]
    flat = [one for fact, own in zip(facts, tasks, strict=True) for one in (own or [fact])]
    found = _judge_all(flat, lambda: queue or Queue(slurm), patient=patient)
    for fact, own in zip(facts, tasks, strict=True):
        if (why := unknown.get(owner(fact.run).path)) is not None:
            parts = [one for one in (own or [fact]) if is_open_for(owner(one.run), one.run)]
            found |= {one.run.path: _being_handed_in(one, why, found) for one in parts}
    return [
        array_status(fact, [found[task.run.path] for task in own]) if own else found[fact.run.path]
        for fact, own in zip(facts, tasks, strict=True)
    ]


def array_status(parent: Facts, tasks: Sequence[RunStatus]) -> RunStatus:
    """One status for an array: what it still does if anything, else the worst of its ends."""
    counts: dict[State, int] = {}
    for task in tasks:
        counts[task.state] = counts.get(task.state, 0) + 1
    order: tuple[State, ...] = (
        "running", "stopping", "starting", "requeued", "pending", "failed", "lost", "cancelled", "paused", "pruned",
        "completed",
    )  # fmt: skip
    state = next(one for one in order if one in counts)
    if parent.record.kind == "sweep" and state not in ACTIVE and "completed" in counts:
        state = "completed"  # one worker that finds nothing left to do knows it of all
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
    )


def _of_all(tasks: Sequence[RunStatus], job_id: str) -> str:
    """What is to be said of an array without a job, once."""
    return "" if job_id else next((task.detail for task in tasks if task.detail), "")


def _task_facts(fact: Facts) -> list[Facts]:
    size = fact.record.array_size
    if fact.record.kind == "sweep":
        sweep = SweepDir(fact.run.path)
        return [read_worker_facts(sweep.worker(index)) for index in range(size or 0)]
    return [] if size is None else [read_facts(fact.run.task(index)) for index in range(size)]


def _judge_all(facts: Sequence[Facts], queue: Callable[[], Queue], *, patient: bool) -> dict[Path, RunStatus]:
    open_ones = [fact for fact in facts if fact.settled is None]
    queued = ask_slurm([fact for fact in open_ones if fact.record.backend == "slurm"], queue, patient=patient)
    found = {}
    for fact in facts:
        if fact.settled is not None:
            found[fact.run.path] = _settled(fact)
            continue
        job = job_of(fact, queued)
        if fact.record.backend == "local":
            job = ask_processes(fact)
        if job.phase in ("ended", "gone"):
            # The ledger's last line may have come between our reading it and the scheduler's answer.
            fact = read_worker_facts(fact.run) if isinstance(fact.run, WorkerDir) else read_facts(fact.run)
        found[fact.run.path] = _settled(fact) if fact.settled is not None else _judge(fact, job)
    return found


def _being_handed_in(fact: Facts, why: str, found: Mapping[Path, RunStatus]) -> RunStatus:
    """A submit or a resume of it is under way, or was cut off, and nobody knows yet whether there is a job."""
    known = found[fact.run.path]
    return _status(fact, "pending", "", why) if known.ended else known


# -- the verdict ----------------------------------------------------------------------------------------------------


def _settled(fact: Facts) -> RunStatus:
    end = fact.settled
    assert end is not None
    if end.decision == "pause":
        return _status(fact, "paused", end.reason, end.detail)
    state: State = end.reason if end.reason in ("completed", "pruned", "cancelled", "lost") else "failed"
    return _status(fact, state, end.reason, end.detail)


def _judge(fact: Facts, job: Job) -> RunStatus:
    judged = _judged(fact, job)
    if fact.record.backend != "slurm":
        return judged
    detail = judged.detail
    if job.note and job.at and not judged.ended:
        said = f"as of {time.strftime('%H:%M:%S', time.localtime(job.at))}; {job.note}"
        detail = f"{detail} ({said})" if detail else said
    return replace(judged, detail=detail, asked=job.at or None, note=job.note)


def _judged(fact: Facts, job: Job) -> RunStatus:
    if job.phase == "unknown":
        return _status(fact, _by_directory(fact), "", job.words)
    if job.phase == "pending":
        why = in_words(job.words).replace("JOB", fact.job_id)
        return _status(fact, "requeued" if fact.attempts else "pending", job.words, why)
    if job.phase == "ending":
        return _status(fact, "stopping", "", "Slurm is taking the job down")
    if job.phase == "running":
        return _running(fact, job)
    return _ended_without_a_word(fact, job)


def _by_directory(fact: Facts) -> State:
    if fact.started is not None:
        return "stopping" if fact.stopping else "running"
    if fact.last_end is not None and fact.last_end.decision == "restart":
        return "starting"
    return "requeued" if fact.attempts else "pending"


def _running(fact: Facts, job: Job) -> RunStatus:
    if fact.stopping or fact.asked is not None:
        reason = fact.asked.reason if fact.asked is not None else ""
        return _status(fact, "stopping", reason, "saving, then leaving")
    if job.state is JobState.SUSPENDED:
        return _status(fact, "running", "", "suspended by Slurm")
    return _status(fact, "starting" if fact.started is None else "running", "", "")


def _ended_without_a_word(fact: Facts, job: Job) -> RunStatus:
    """No job any more, and a ledger that does not say why."""
    if _has_live_lease(fact):
        return _status(fact, "running", "", f"its lease is held by a process that lives: {fact.run.lease}")
    said = "" if job.phase == "gone" else f"Slurm says {job.state.value}"
    cancelled = job.state is JobState.CANCELLED
    if fact.asked is not None and fact.asked.then == "cancel":
        return _status(fact, "cancelled", "cancelled", said)
    if fact.asked is not None and fact.asked.then == "pause" and fact.started is None:
        return _status(fact, "paused", "stop", "stopped while it waited in the queue")
    if cancelled:
        return _status(fact, "cancelled", "cancelled", said)
    if not fact.job_id and not fact.run.is_trial:
        how = f"hpcaccel {'sweep ' if fact.run.is_worker else ''}resume {owner(fact.run).run_id}"
        detail = f"its submit was cut off before a job was handed in: nothing runs. Hand it in with `{how}`"
        return _status(fact, "failed", "failed", detail)
    if fact.started is not None or fact.attempts:
        detail = "the batch step ended without a word" + (f"; {said}" if said else "")
        return _status(fact, "lost", "lost", detail)
    state: State = "lost" if job.phase == "gone" and fact.record.backend == "slurm" else "failed"
    detail = f"the job ended before its first attempt; see {fact.run.slurm_log}" + (f"; {said}" if said else "")
    return _status(fact, state, "lost" if state == "lost" else "failed", detail)


def _has_live_lease(fact: Facts) -> bool:
    """Whether a process of this host writes to the run."""
    lease = None if fact.run.is_trial else read_json(fact.run.lease)
    return (
        lease is not None
        and lease["host"] == socket.gethostname()
        and process_start(lease["pid"]) == lease["pid_start"]
    )


def _status(fact: Facts, state: State, reason: str, detail: str) -> RunStatus:
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
