"""``worker.jsonl``: for how long a worker has held its allocation, written so that a killed host costs little of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from hpcaccel.core.process_identity import process_start, started_at
from hpcaccel.core.records import Decision, Reason, WorkerEnd, WorkerSeen, WorkerStart, WorkerTaken, to_dict
from hpcaccel.core.run_dir import WorkerDir, append_line
from hpcaccel.node import batch
from hpcaccel.node.allocation import Allocation
from hpcaccel.node.sweep.slots import gpus_of

__all__ = ["WorkerAccount"]

SHARE = 0.01
"""A sign comes after so much of the time that the allocation has been held: what a killed host leaves unsaid stays
below, and the lines of the first hour are some hundred."""
FEWEST_SECONDS, MOST_SECONDS = 1.0, 60.0


class WorkerAccount:
    """The only writer of ``worker.jsonl``."""

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
            # A controller that does not answer: the batch step cannot have begun much later.
            allocated_at=allocated_at or started_at((batch.began() or (pid, now))[0]),
            host=socket.gethostname(),
            pid=pid,
            pid_start=process_start(pid) or 0,
        )
        self._began = line.allocated_at or now
        self._seen = now
        self._append(line, sync=True)
        return line

    def trial(self, number: int, what: Literal["started", "ended"], *, trials: Collection[int]) -> None:
        """One has started, or ended; ``trials`` are those in flight after that."""
        self._trials = trials
        self._write(WorkerSeen(time=time.time(), trial=number, what=what, trials=sorted(trials)))

    def sign(self) -> None:
        """To be called often: writes a line when it is time for one."""
        now = time.time()
        if now - self._seen >= min(MOST_SECONDS, max(FEWEST_SECONDS, SHARE * (now - self._began))):
            self._write(WorkerSeen(time=now, trials=sorted(self._trials)))

    def taken(self, moment: float) -> None:
        """Slurm has begun to take the allocation down. To be said as often as one likes."""
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
            # A full disk: the trials may still come to a good end, which is worth more than the account.
            print(f"hpcaccel: cannot write {self._path}: {error.strerror}", flush=True)


def _cpus_of(env: Mapping[str, str], nodes: Sequence[str], *, local: bool) -> int:
    if local:
        return len(os.sched_getaffinity(0))
    return int(env.get("SLURM_CPUS_ON_NODE") or 0) * len(nodes)
