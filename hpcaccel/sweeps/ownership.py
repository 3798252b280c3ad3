"""Which worker a trial belongs to: claims in the journal, each with an epoch, of which the first one counts.

A worker writes ``claim`` with the epoch that follows the newest one, and looks which claim of that epoch came first:
all read the same order, so exactly one has won. A worker that was believed dead finds a higher epoch than its own, and
lets the trial go. (Its ranks are kept from writing by the run's lease and by the attempt that has begun after theirs.)

Slurm alone says who is dead. A worker that was requeued and waits is not, and neither is one of whom nothing is known.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import WorkerStart, from_dict
from hpcaccel.core.run_dir import SweepDir, WorkerDir, read_json, read_lines
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache import Queue
from hpcaccel.submission.local import local_process
from hpcaccel.sweeps.journal_reader import StudyRecord

__all__ = ["Claim", "Notes", "gone_for_good"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Whose a trial is. ``time`` is in seconds since the epoch."""

    trial: int
    worker: int
    epoch: int
    token: str = ""
    """Which start of the worker it was."""
    time: float = 0.0


class Notes:
    """What our own lines in a sweep's journal say: whose each trial is, and whether the sweep has stopped itself."""

    def __init__(self, study: StudyRecord) -> None:
        self._study = study
        self._taken = 0
        self.claims: dict[int, Claim] = {}
        """The one that counts, by trial."""
        self.halted = ""
        """Why the sweep has stopped itself, until somebody resumes it."""
        self.resumed = 0.0
        """When somebody did that last, in seconds since the epoch."""

    def read(self) -> Notes:
        """Take in what is new in the journal."""
        self._study.read()
        for note in self._study.notes[self._taken :]:
            self._take(note)
        self._taken = len(self._study.notes)
        return self

    def _take(self, note: dict[str, Any]) -> None:
        match note["hpcaccel"]:
            case "claim":
                claim = from_dict(Claim, note)
                if claim.epoch == self.epoch(claim.trial) + 1:
                    self.claims[claim.trial] = claim
            case "halt":
                self.halted = str(note["why"])
            case "resume":
                self.halted, self.resumed = "", float(note.get("time", 0.0))

    def epoch(self, trial: int) -> int:
        """Of the claim that counts; 0 where nobody has claimed the trial."""
        return self.claims[trial].epoch if trial in self.claims else 0

    def owner(self, trial: int) -> int | None:
        """The worker that the trial belongs to."""
        return self.claims[trial].worker if trial in self.claims else None


def gone_for_good(sweep: SweepDir, workers: Collection[int], slurm: Slurm, *, at_once: bool = False) -> set[int]:
    """Those of ``workers`` that will never come back by themselves.

    Args:
        at_once: Slurm is asked now. Otherwise its last answer does while it is not too old, whoever of the user's
            processes has asked.
    """
    jobs = {worker: job for worker in workers if (job := _newest_job(sweep.worker(worker)))}
    local = {worker for worker, job in jobs.items() if job.startswith("local-")}
    submitted = {job: _submitted(sweep.worker(worker)) for worker, job in jobs.items() if worker not in local}
    answer = Queue(slurm).look(submitted, submitted=submitted, after=time.time() if at_once else 0.0)
    # An old word would do for an end, and not for a job that comes back: so nothing counts while Slurm is silent.
    ended = set() if answer.note else {job for job, known in answer.jobs.items() if known.gone or known.state.is_ended}
    return {
        worker
        for worker, job in jobs.items()
        if (_process_gone(sweep.worker(worker)) if worker in local else job in ended)
    }


def _newest_job(worker: WorkerDir) -> str:
    """The job that was submitted last for a worker, whether it has begun or not; empty where none is known."""
    jobs = (read_json(worker.record) or {}).get("job_ids", [])
    start = _newest_start(worker)
    return str(jobs[-1]) if jobs else "" if start is None else start.job_id


def _newest_start(worker: WorkerDir) -> WorkerStart | None:
    lines = [line for line, _ in read_lines(worker.account) if line.get("event") == "start"]
    return from_dict(WorkerStart, lines[-1]) if lines else None


def _process_gone(worker: WorkerDir) -> bool:
    process = local_process(worker)
    if process is not None:
        return process.is_here and not process.is_alive
    start = _newest_start(worker)
    return start is not None and start.host == socket.gethostname() and process_start(start.pid) != start.pid_start


def _submitted(worker: WorkerDir) -> float:
    """When its newest job was submitted at the latest; 0.0 where that is not known."""
    try:
        return os.stat(worker.record).st_mtime
    except OSError:
        return 0.0
