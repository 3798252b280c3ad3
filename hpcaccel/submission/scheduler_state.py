"""What the scheduler says about a run's newest job, and whether the run's own ledger knows better."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcaccel.slurm.queue_cache import Answer, Known, Queue
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import local
from hpcaccel.submission.run_state import Facts

__all__ = ["Job", "ask_processes", "ask_slurm", "job_of"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the scheduler says about a run's newest job."""

    phase: Literal["pending", "running", "ending", "ended", "gone", "unknown"]
    state: JobState = JobState.UNKNOWN
    words: str = ""
    at: float = 0.0
    """When the scheduler said so, in seconds since the epoch; 0.0: it has not."""
    note: str = ""
    """Why that is not newer."""


def ask_slurm(facts: Sequence[Facts], queue: Callable[[], Queue], *, patient: bool) -> dict[str, Job]:
    submitted = {job_id: _submitted(fact) for fact in facts for job_id in _jobs(fact)}
    if not submitted:
        return {}
    answer = queue().look(submitted, submitted=submitted, after=0.0 if patient else None)
    return {job_id: _from_known(known, answer) for job_id, known in answer.jobs.items()}


def _jobs(fact: Facts) -> list[str]:
    """The newest job, and those that may go on with the run where that one is over."""
    return [job_id for job_id in dict.fromkeys([fact.job_id, *fact.waiting, *fact.unrecorded]) if job_id]


def _submitted(fact: Facts) -> float:
    """When the newest job was submitted at the latest: that is written into the record."""
    try:
        return os.stat(fact.run.record).st_mtime
    except OSError:
        return fact.record.created


def job_of(fact: Facts, queued: Mapping[str, Job]) -> Job:
    """The run's newest job; where that one is over, the first of those behind it in a chain, or who holds its lease."""
    newest = queued.get(fact.job_id) or Job(phase="gone")  # its record names no job
    if newest.phase in ("ended", "gone"):
        behind = [queued[job_id] for job_id in _jobs(fact)[1:] if job_id in queued]
        newest = next((job for job in behind if job.phase not in ("ended", "gone")), newest)
    return Job(phase="unknown", at=newest.at) if _is_older(newest, fact) else newest


def _is_older(job: Job, fact: Facts) -> bool:
    """Whether the ledger has later news than the scheduler's word."""
    last = fact.started or fact.last_end
    return last is not None and 0.0 < job.at < last.time


def _from_known(known: Known, answer: Answer) -> Job:
    state, at = known.state, known.at
    if known.gone:
        return Job(phase="gone", at=at, note=answer.note)
    if state is JobState.UNKNOWN:
        return Job(phase="unknown", words=known.words, at=at, note=answer.note)
    phase: Literal["pending", "running", "ending", "ended"] = "ended"
    if state.is_pending:
        phase = "pending"
    elif state.is_running:
        phase = "running"
    elif state.is_ending:
        phase = "ending"
    return Job(phase=phase, state=state, words=known.reason, at=at, note=answer.note)


def ask_processes(fact: Facts) -> Job:
    process = local.local_process(fact.run)
    if process is None:
        return Job(phase="gone")
    if not process.is_here:
        return Job(phase="unknown", words=f"it was started on {process.host}; ask there")
    if not process.is_alive:
        return Job(phase="gone")
    if fact.run.is_task and not fact.run.slurm_log.exists():
        return Job(phase="pending", state=JobState.PENDING, words="waits for the tasks before it")
    return Job(phase="running", state=JobState.RUNNING)
