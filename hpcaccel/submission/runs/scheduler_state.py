"""The scheduler's view of a run's newest job.

A job may still be queued although its run has ended. When such a job starts, its supervisor finds the end of the run in
the ledger and exits; a held job stays in the queue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache import CachedJob, CachedJobs, Queue
from hpcaccel.slurm.states import JobState, QueueEntry
from hpcaccel.submission.jobs import local
from hpcaccel.submission.jobs.run_state import RunState, read_record

__all__ = [
    "SchedulerJob",
    "job_of",
    "left_in_queue",
    "query_processes",
    "query_slurm",
    "sentence_on",
]


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """The scheduler's state of a run's newest job."""

    phase: Literal["pending", "running", "ending", "ended", "gone", "unknown"]
    state: JobState = JobState.UNKNOWN
    words: str = ""
    at: float = 0.0
    """Time of the query, in seconds since 1970; 0.0 if there was no query."""
    note: str = ""
    """Why no newer state is available; "" if the query succeeded."""
    entry: QueueEntry | None = None
    """The job's line of squeue, if its state comes from there."""


def query_slurm(facts: Sequence[RunState], queue: Callable[[], Queue], *, patient: bool) -> dict[str, SchedulerJob]:
    submitted = {job_id: _submitted(fact) for fact in facts for job_id in _jobs(fact)}
    if not submitted:
        return {}
    answer = queue().look(submitted, submitted=submitted, after=0.0 if patient else None)
    return {job_id: _from_known(known, answer) for job_id, known in answer.jobs.items()}


def _jobs(fact: RunState) -> list[str]:
    """The newest job, and the jobs that may continue the run after it."""
    return [job_id for job_id in dict.fromkeys([fact.job_id, *fact.waiting, *fact.unrecorded]) if job_id]


def _submitted(fact: RunState) -> float:
    """An upper bound on the newest job's submission time: the last write of the run's record."""
    try:
        return os.stat(fact.run.record).st_mtime
    except OSError:
        return fact.record.created


def job_of(fact: RunState, queued: Mapping[str, SchedulerJob]) -> SchedulerJob:
    """The run's newest job; if it has ended, the first active job of its chain, or the job that holds the lease."""
    newest = queued.get(fact.job_id) or SchedulerJob(phase="gone")  # the run's record has no job
    if newest.phase in ("ended", "gone"):
        behind = [queued[job_id] for job_id in _jobs(fact)[1:] if job_id in queued]
        newest = next((job for job in behind if job.phase not in ("ended", "gone")), newest)
    return SchedulerJob(phase="unknown", at=newest.at) if _is_older(newest, fact) else newest


def _is_older(job: SchedulerJob, fact: RunState) -> bool:
    last = fact.started or fact.last_end
    return last is not None and 0.0 < job.at < last.time


def _from_known(known: CachedJob, answer: CachedJobs) -> SchedulerJob:
    state, at = known.state, known.at
    if known.gone:
        return SchedulerJob(phase="gone", at=at, note=answer.note)
    if state is JobState.UNKNOWN:
        return SchedulerJob(phase="unknown", words=known.words, at=at, note=answer.note)
    phase: Literal["pending", "running", "ending", "ended"] = "ended"
    if state.is_pending:
        phase = "pending"
    elif state.is_running:
        phase = "running"
    elif state.is_ending:
        phase = "ending"
    return SchedulerJob(phase=phase, state=state, words=known.reason, at=at, note=answer.note, entry=known.entry)


def query_processes(fact: RunState) -> SchedulerJob:
    process = local.local_process(fact.run)
    if process is None:
        return SchedulerJob(phase="gone")
    if not process.is_here:
        return SchedulerJob(phase="unknown", words=f"the job was started on {process.host}: query its status there")
    if not process.is_alive:
        return SchedulerJob(phase="gone")
    if fact.run.is_task and not fact.run.slurm_log.exists():
        return SchedulerJob(phase="pending", state=JobState.PENDING, words="waiting for earlier tasks of the array")
    return SchedulerJob(phase="running", state=JobState.RUNNING)


def left_in_queue(run: RunDir, slurm: Slurm) -> list[QueueEntry]:
    """The pending jobs of an ended run, by one query to Slurm; [] if Slurm does not respond."""
    record = read_record(run)
    if record.backend != "slurm" or not record.job_ids:
        return []
    try:
        queued = slurm.queue(record.job_ids)
    except HpcaccelError:
        return []  # unknown, and jobs could not be cancelled now either
    return [entry for entry in queued.values() if entry.state.is_pending]


def sentence_on(entry: QueueEntry) -> str:
    how = "held" if entry.is_held else entry.state.value.lower()
    return f"job {entry.job_id} is still in the queue ({how}{f', {entry.reason}' if entry.reason else ''})"
