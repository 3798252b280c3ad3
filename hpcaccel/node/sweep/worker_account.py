"""Records in ``worker.jsonl`` how long a worker holds its allocation, at intervals because the worker may be killed."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpcaccel.core.durable_files import append_line, read_lines
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.process_identity import process_start, started_at
from hpcaccel.core.records import Decision, Reason, WorkerEnd, WorkerSeen, WorkerStart, WorkerTaken, to_dict
from hpcaccel.core.sweep_dir import WorkerDir
from hpcaccel.node import batch
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, gpus_of
from hpcaccel.node.allocation.slurm_allocation import unchained_allocation
from hpcaccel.node.batch import killed_by

__all__ = ["WorkerAccount", "record_killed", "record_setup_failure"]

log = logging.getLogger(__name__)

_NOT_AGAIN = "a worker that ends in this way twice in a row is not requeued"
SHARE = 0.01
"""Interval between ``seen`` lines, as a fraction of the time for which the allocation has been held. If a
worker is killed, at most about this fraction is not recorded. In its first hour a worker writes a few hundred lines."""
DETAIL_LENGTH = 300
"""Largest number of characters of a trial's ``detail`` that are recorded."""
FEWEST_SECONDS, MOST_SECONDS = 1.0, 60.0
"""Shortest and longest interval between ``seen`` lines."""


class WorkerAccount:
    """Writes the lines of ``worker.jsonl``. No other code writes this file."""

    def __init__(self, worker: WorkerDir) -> None:
        self._path = worker.account
        self._began = time.time()
        self._seen = 0.0
        self._trials: Collection[int] = ()
        self._taken = False

    def start(self, allocation: Allocation, *, allocated_at: float | None, local: bool) -> WorkerStart:
        now, pid = time.time(), os.getpid()
        line = WorkerStart(
            time=now,
            job_id=allocation.job_id,
            restart_count=allocation.restart_count,
            nodes=allocation.nodes,
            gpus=gpus_of(os.environ, allocation.nodes, local=local),
            cpus=_cpus_of(os.environ, allocation.nodes, local=local),
            # If the controller does not respond, use the start of the batch step, which is not much later.
            allocated_at=allocated_at or started_at((batch.began() or (pid, now))[0]),
            host=socket.gethostname(),
            pid=pid,
            pid_start=process_start(pid) or 0,
        )
        self._began = line.allocated_at or now
        self._seen = now
        self._append(line, sync=True)
        return line

    def started(self, number: int, *, trials: Collection[int]) -> None:
        """Record that trial ``number`` has started. ``trials`` are the trials that are running now."""
        self._trials = trials
        self._write(WorkerSeen(time=time.time(), trial=number, what="started", trials=sorted(trials)))

    def ended(self, number: int, end: Mapping[str, Any], *, trials: Collection[int]) -> None:
        """Record that trial ``number`` has ended, as its supervisor has reported it in ``end``."""
        self._trials = trials
        line = WorkerSeen(
            time=time.time(),
            trial=number,
            what="ended",
            trials=sorted(trials),
            reason=str(end.get("reason") or ""),
            decision=str(end.get("decision") or ""),
            detail=str(end.get("detail") or "")[:DETAIL_LENGTH],
        )
        self._write(line)

    def sign(self) -> None:
        """Write a ``seen`` line if one is due. Call this often."""
        now = time.time()
        if now - self._seen >= min(MOST_SECONDS, max(FEWEST_SECONDS, SHARE * (now - self._began))):
            self._write(WorkerSeen(time=now, trials=sorted(self._trials)))

    def taken(self, moment: float) -> None:
        """Record when Slurm began to terminate the allocation. Only the first call writes a line."""
        if not self._taken:
            self._taken = True
            self._append(WorkerTaken(time=moment), sync=False)

    def end(self, reason: Reason, decision: Decision, detail: str = "") -> None:
        self._append(WorkerEnd(time=time.time(), reason=reason, decision=decision, detail=detail), sync=True)

    def _write(self, line: WorkerSeen) -> None:
        self._seen = line.time
        self._append(line, sync=False)

    def _append(self, line: WorkerStart | WorkerSeen | WorkerTaken | WorkerEnd, *, sync: bool) -> None:
        try:
            append_line(self._path, to_dict(line), sync=sync)
        except OSError as error:
            # The disk may be full, for instance. The trials may still end well, which matters more than this record.
            log.warning(f"cannot write {self._path}: {error.strerror}")


def record_setup_failure(worker: WorkerDir, *, exit_code: int, name: str) -> int:
    """Record a worker that could not start because a set-up line failed. Returns exit code 1."""
    worker.prepare()
    launch = read_launch(worker)
    allocation = unchained_allocation(worker, launch)
    account = WorkerAccount(worker)
    account.start(allocation, allocated_at=allocation.status().start_time, local=launch.local)
    detail = f"{name} failed with exit code {exit_code}; see {worker.slurm_log}"
    account.end("failed", "end", detail)
    log.error(detail)
    return 1


def record_killed(worker: WorkerDir, why: str) -> int:
    """Record that the worker processes of this batch step keep being killed. Requeue the job, unless
    ``resilience.requeue`` is off or the worker's last end had the same cause. Returns the batch step's exit code."""
    killed_by()  # removes the variable: the first worker process of the next start must not report this kill
    worker.prepare()
    launch = read_launch(worker)
    allocation = unchained_allocation(worker, launch)
    ends = [line for line, _ in read_lines(worker.account) if line.get("event") == "end"]
    again = launch.resilience.requeue and not (ends and ends[-1].get("detail", "").endswith(_NOT_AGAIN))
    account = WorkerAccount(worker)
    detail = f"{why}; {_NOT_AGAIN}"
    account.end("failed", "requeue" if again else "end", detail)
    log.error(detail)
    if again and (problem := allocation.requeue()):
        account.end("cancelled" if problem == TAKEN_DOWN else "failed", "end", f"not requeued: {problem}")
    return 1


def _cpus_of(env: Mapping[str, str], nodes: Sequence[str], *, local: bool) -> int:
    if local:
        return len(os.sched_getaffinity(0))
    return int(env.get("SLURM_CPUS_ON_NODE") or 0) * len(nodes)
