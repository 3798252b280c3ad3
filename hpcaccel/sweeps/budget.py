"""What a sweep has cost, and what it may still cost.

The unit is the GPU-second: what an allocation holds, times how long it is held, whether anything runs in it or not, as
the cluster's own accounting counts. An allocation without GPUs counts as one for each rank that it has room for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hpcaccel.core.records import WorkerEnd, WorkerSeen, WorkerStart, WorkerTaken, from_dict
from hpcaccel.core.run_dir import SweepDir, read_lines

__all__ = ["Account", "Budget", "Held", "in_hours", "raise_it", "too_small", "too_small_for_any", "typical"]

FRESH_SECONDS = 150.0
"""A worker gives a sign at least every minute: an open allocation with a younger one than this is still held."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One allocation of a worker, from when it was granted to its end. Times are seconds since the epoch."""

    worker: int
    start: WorkerStart
    seen: float
    """The last moment at which it is known to have been held."""
    ended: bool
    taken: float | None = None
    """When Slurm began to take it down, where it did. As in its own accounting, nothing counts after that."""

    @property
    def began(self) -> float:
        return self.start.time if self.start.allocated_at is None else self.start.allocated_at

    def seconds(self, now: float) -> float:
        """How long it has been held, in seconds."""
        if self.taken is not None:
            return max(0.0, self.taken - self.began)
        alive = not self.ended and now - self.seen < FRESH_SECONDS
        return max(0.0, (max(now, self.seen) if alive else self.seen) - self.began)


@dataclass
class Account:
    """The sum over all workers' ``worker.jsonl``. ``read`` takes in what is new.

    Args:
        ranks: for how many ranks an allocation has room; counts where it holds no GPUs.
    """

    sweep: SweepDir
    ranks: int = 1
    held: dict[int, list[Held]] = field(default_factory=dict)
    """By worker, oldest first."""
    _offsets: dict[int, int] = field(default_factory=dict)

    def read(self) -> Account:
        for index in self.sweep.worker_indices():
            path = self.sweep.worker(index).account
            for line, behind in read_lines(path, offset=self._offsets.get(index, 0)):
                self._offsets[index] = behind
                self._take(index, line)
        return self

    def gpu_seconds(self, now: float | None = None) -> float:
        """What all workers have been given so far."""
        now = time.time() if now is None else now
        return sum(one.seconds(now) * self.gpus(one) for stays in self.held.values() for one in stays)

    def gpus(self, one: Held) -> int:
        return one.start.gpus or self.ranks

    def is_fresh(self, worker: int, now: float | None = None) -> bool:
        """Whether a worker has given a sign lately, and has not said that it leaves."""
        newest = self.held[worker][-1] if self.held.get(worker) else None
        now = time.time() if now is None else now
        return newest is not None and not newest.ended and now - newest.seen < FRESH_SECONDS

    def _take(self, index: int, line: dict[str, object]) -> None:
        stays = self.held.setdefault(index, [])
        if line.get("event") == "start":
            start = from_dict(WorkerStart, line)
            if stays and _same_stay(stays[-1].start, start):  # its host was killed, and started again
                stays[-1] = replace(stays[-1], seen=start.time, ended=False)
                return
            if stays:  # what came before is over, whether its host could still say so or not
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


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``sweep.max_gpu_hours``. What trials have used, and what is compared with it, is in GPU-seconds."""

    max_gpu_hours: float | None

    def is_used_up(self, spent: float) -> bool:
        return self.max_gpu_hours is not None and spent >= self.max_gpu_hours * 3600

    def against_a_trial(self, spent: float, *, usual: float, running: Iterable[float]) -> str:
        """Why no other trial may start, in a sentence; empty where one may.

        Args:
            usual: what a trial costs; 0 where none has ended yet.
            running: what each trial that runs now has used.
        """
        if self.max_gpu_hours is None:
            return ""
        if self.is_used_up(spent):
            return f"max_gpu_hours is {self.max_gpu_hours:g}, and {in_hours(spent)} are used up"
        promised = sum(max(0.0, usual - used) for used in running)
        if spent + promised + usual <= self.max_gpu_hours * 3600:
            return ""
        others = f", those that run will take {in_hours(promised)} more" if promised else ""
        return (
            f"max_gpu_hours is {self.max_gpu_hours:g}: {in_hours(spent)} are used up{others}, and a trial takes "
            f"{in_hours(usual)}"
        )


def typical(costs: Sequence[float]) -> float:
    """What the next trial is likely to take, from what those that have ended took, pruned ones included; 0 without."""
    return sum(costs) / len(costs) if costs else 0.0


def too_small(budget: Budget, *, sweep: str, trial: int, used: float, step: int | None, total: int | None) -> str:
    """What to say when a budget was used up before any trial had ended.

    Args:
        sweep: its id.
        used: GPU-seconds of the trial that came furthest.
        step: how far it came, of ``total`` optimizer steps, where that is known.
    """
    text = f"max_gpu_hours is {budget.max_gpu_hours:g}, less than one trial takes: "
    whole = used
    if step and total and total > step:
        whole = used * total / step
        text += f"trial {trial} has used {in_hours(used)} for {step} of {total} steps, about "
        text += f"{in_hours(whole)} for all of them"
    else:
        text += f"trial {trial} has used {in_hours(used)} and was not done"
    return f"{text}. {raise_it(budget, sweep=sweep, spent=whole)}"


def too_small_for_any(budget: Budget, spent: float, *, sweep: str) -> str:
    """What to say when the workers' start alone has used it up; ``spent`` are GPU-seconds."""
    return (
        f"max_gpu_hours is {budget.max_gpu_hours:g}, and {in_hours(spent)} were used up before any trial had begun. "
        f"{raise_it(budget, sweep=sweep, spent=spent)}"
    )


def raise_it(budget: Budget, *, sweep: str, spent: float) -> str:
    """How to go on under a larger budget, as a command.

    Args:
        spent: GPU-seconds, of which twice as many would be a beginning.
    """
    hours = 2 * max(budget.max_gpu_hours or 0.0, spent / 3600)
    return (
        "Nothing is lost: what was begun goes on under a larger budget, with "
        f"`hpcaccel sweep resume {sweep} sweep.max_gpu_hours={hours:.2g}` or more"
    )


def in_hours(gpu_seconds: float) -> str:
    """``12.3 GPU-hours``, with digits enough for small numbers."""
    hours = gpu_seconds / 3600
    return f"{hours:.1f} GPU-hours" if hours >= 10 else f"{hours:.2g} GPU-hours"
