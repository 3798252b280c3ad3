"""The compute time that the workers of a sweep have used.

The unit is the GPU-second: an allocation's number of GPUs times the seconds it is held, idle or not, as in the
cluster's own accounting. An allocation without GPUs counts as one GPU for each rank it has room for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.records import WorkerEnd, WorkerSeen, WorkerStart, WorkerTaken, from_dict
from hpcaccel.core.sweep_dir import SweepDir

__all__ = ["ComputeAccount", "Held"]

FRESH_SECONDS = 150.0
"""An allocation counts as held if its last heartbeat is younger than this. Workers write one at least every minute."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One allocation of a worker, from its start to its end. Times are seconds since the epoch."""

    worker: int
    start: WorkerStart
    seen: float
    """Time of the last heartbeat."""
    ended: bool
    taken: float | None = None
    """When Slurm began to end the allocation; None if it did not. Time after that does not count, as in
    Slurm's accounting."""

    @property
    def began(self) -> float:
        return self.start.time if self.start.allocated_at is None else self.start.allocated_at

    def seconds(self, now: float) -> float:
        """Seconds for which the allocation has been held."""
        if self.taken is not None:
            return max(0.0, self.taken - self.began)
        alive = not self.ended and now - self.seen < FRESH_SECONDS
        return max(0.0, (max(now, self.seen) if alive else self.seen) - self.began)


@dataclass
class ComputeAccount:
    """Compute time of all workers, from their ``worker.jsonl`` files. ``read`` reads new lines.

    Args:
        ranks: number of ranks in an allocation, counted instead of GPUs if it has none.
    """

    sweep: SweepDir
    ranks: int = 1
    held: dict[int, list[Held]] = field(default_factory=dict)
    """The allocations of each worker, oldest first."""
    _offsets: dict[int, int] = field(default_factory=dict)

    def read(self) -> ComputeAccount:
        for index in self.sweep.worker_indices():
            path = self.sweep.worker(index).account
            for line, behind in read_lines(path, offset=self._offsets.get(index, 0)):
                self._offsets[index] = behind
                self._take(index, line)
        return self

    def gpu_seconds(self, now: float | None = None) -> float:
        """GPU-seconds of all allocations so far."""
        now = time.time() if now is None else now
        return sum(one.seconds(now) * self.gpus(one) for stays in self.held.values() for one in stays)

    def gpus(self, one: Held) -> int:
        return one.start.gpus or self.ranks

    def is_fresh(self, worker: int, now: float | None = None) -> bool:
        """Whether a worker has a recent heartbeat and has not ended."""
        newest = self.held[worker][-1] if self.held.get(worker) else None
        now = time.time() if now is None else now
        return newest is not None and not newest.ended and now - newest.seen < FRESH_SECONDS

    def _take(self, index: int, line: dict[str, object]) -> None:
        stays = self.held.setdefault(index, [])
        if line.get("event") == "start":
            start = from_dict(WorkerStart, line)
            if stays and _same_stay(stays[-1].start, start):  # the worker was killed and restarted
                stays[-1] = replace(stays[-1], seen=start.time, ended=False)
                return
            if stays:  # the previous allocation has ended, even if its worker did not record this
                stays[-1] = replace(stays[-1], ended=True)
            stays.append(Held(worker=index, start=start, seen=start.time, ended=False))
        elif stays and line.get("event") == "taken":
            stays[-1] = replace(stays[-1], taken=from_dict(WorkerTaken, line).time)
        elif stays and line.get("event") in ("seen", "end"):
            ended = line["event"] == "end"
            sign = from_dict(WorkerEnd, line).time if ended else from_dict(WorkerSeen, line).time
            last = stays[-1]
            stays[-1] = replace(last, seen=max(last.seen, sign), ended=ended)


def _same_stay(one: WorkerStart, other: WorkerStart) -> bool:
    if one.allocated_at is None or other.allocated_at is None or abs(one.allocated_at - other.allocated_at) > 1.0:
        return False
    return (one.job_id, one.restart_count) == (other.job_id, other.restart_count)
