"""Detection of stragglers: ranks that slow down all other ranks.

All ranks take the same time per step, because each waits for the slowest. They differ in their own time: the time from
the end of a step to the first wait for other ranks. With DDP the first wait is in the backward pass, so the own time
covers data, the forward pass and the script's code. With sharded models the forward pass waits too, so the own time
ends when the batch has arrived. With DDP on GPUs, device time is measured for a sample of steps.

Each rank's median is sent as part of a stop agreement, which the ranks need anyway. This adds no wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.core.durable_files import append_line, read_json
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir

if TYPE_CHECKING:
    import torch

    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.settings import Settings

__all__ = ["OwnTime", "StragglerWatch", "slow_ranks"]

RATIO = 1.2
"""Minimum ratio of a slow rank's own time to the median of all ranks."""
SHARE = 0.05
"""Minimum excess of a slow rank's own time over the median, as a share of the time per step."""
TIMES = 2
"""Number of consecutive measurements in which a rank must be slow before it is reported."""
SAMPLE_STEPS = 5
"""On GPUs, a rank's own time is measured in every fifth step only."""


class OwnTime:
    """This rank's own time per step, and the latest own times of all ranks.

    Args:
        device: the rank's device; on a GPU, device time is measured, unless ``until_batch`` is set.
        until_batch: whether the own time ends when the batch has arrived, because the forward pass waits for other
            ranks.
    """

    def __init__(self, device: torch.device, *, until_batch: bool) -> None:
        self.until_batch = until_batch
        self.all_ranks: tuple[int, list[int], float] | None = None
        """Tuple of the step, each rank's own time in microseconds (0: not measured), and the seconds per step. Read by
        the heartbeat's thread."""
        self._batch_at = 0.0
        self._event_class = None if until_batch else _event_class(device)
        self._since = 0.0
        self._times: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        self._open: Any = None
        self._steps = 0
        self._window = 0.0
        self.step_seconds = 0.0

    @classmethod
    def of(cls, group: RankGroup, settings: Settings) -> OwnTime | None:
        """An ``OwnTime`` for this rank; None for a single process."""
        if group.world_size == 1:
            return None
        return cls(group.device, until_batch=settings.strategy == "fsdp" or group.ranks_per_batch > 1)

    def step_is_over(self) -> None:
        self._steps += 1
        if not self._window:
            self._window = time.perf_counter()
        if self._event_class is None:
            self._since = time.perf_counter()
            self._batch_at = 0.0
        elif self._steps % SAMPLE_STEPS == 0:
            self._open = self._event()

    def batch_has_come(self) -> None:
        if self._since and not self._batch_at:
            self._batch_at = time.perf_counter()

    def discard(self) -> None:
        """Discard the measurement in progress. Called if the end of a step was reported too late."""
        self._since, self._open = 0.0, None

    def backward_begins(self) -> None:
        if self._since:
            end = self._batch_at if self.until_batch else time.perf_counter()
            if end:
                self._times.append(end - self._since)
            self._since = 0.0
        elif self._open is not None:
            self._events.append((self._open, self._event()))
            self._open = None

    def _event(self) -> Any:
        assert self._event_class is not None
        event = self._event_class(enable_timing=True)
        event.record()
        return event

    def take(self) -> int:
        """The median own time since the last call, in microseconds; 0 if nothing was measured. Starts a new series of
        measurements."""
        now = time.perf_counter()
        self.step_seconds = (now - self._window) / max(1, self._steps)
        self._window, self._steps = now, 0
        for begin, end in self._events:
            if end.query():
                self._times.append(begin.elapsed_time(end) / 1000)
        times, self._times, self._events = self._times, [], []
        return min(int(_median(times) * 1e6), 2**31 - 1) if times else 0

    def record_all(self, step: int, times: list[int]) -> None:
        self.all_ranks = (step, times, self.step_seconds)


def _event_class(device: torch.device) -> Any:
    """The class of the device's events. Imports torch, which a heartbeat alone does not need."""
    from hpcaccel.runtime.distributed.device_backend import timing_event

    return timing_event(device)


def _median(values: Sequence[float]) -> float:
    """The median; the lower of the two middle values if the number of values is even."""
    return sorted(values)[(len(values) - 1) // 2]


def slow_ranks(microseconds: Sequence[int], step_seconds: float) -> dict[int, float]:
    """The slow ranks, each with the ratio of its own time to the median. Of two ranks, the faster one's time is the
    median."""
    known = [value for value in microseconds if value]
    if len(known) < 2:
        return {}
    usual = _median(known)
    return {
        rank: round(value / usual, 2)
        for rank, value in enumerate(microseconds)
        if value > RATIO * usual and (value - usual) / 1e6 > SHARE * step_seconds
    }


class StragglerWatch:
    """Prints changes in the set of slow ranks and appends them to ``stragglers.jsonl``. Runs on rank 0 in the
    heartbeat's thread."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._last: object = None
        self._counts: dict[int, int] = {}
        self._reported: set[int] = set()

    def check(self, own: OwnTime | None) -> None:
        latest = None if own is None else own.all_ranks
        if latest is None or latest is self._last:
            return
        self._last = latest
        step, times, step_seconds = latest
        slow = slow_ranks(times, step_seconds)
        self._counts = {rank: self._counts.get(rank, 0) + 1 for rank in slow}
        lasting = {rank for rank, count in self._counts.items() if count >= TIMES}
        # A reported rank remains reported until it is normal in a measurement.
        lasting |= self._reported & set(slow)
        if lasting != self._reported:
            self._reported = lasting
            self._report(step, {rank: slow[rank] for rank in sorted(lasting)}, times, step_seconds)

    def _report(self, step: int, slow: dict[int, float], times: list[int], step_seconds: float) -> None:
        found = [{"rank": rank, "node": self._node(rank), "ratio": ratio} for rank, ratio in slow.items()]
        line = {
            "time": time.time(),
            "step": step,
            "slow": found,
            "usual_seconds": _median([value for value in times if value]) / 1e6,
            "step_seconds": round(step_seconds, 6),
        }
        try:
            append_line(self._run.stragglers(self._attempt), line)
        except OSError as error:
            print(f"hpcaccel: could not record slow ranks in stragglers.jsonl: {error}", file=sys.stderr, flush=True)
        texts = [
            f"rank {one['rank']} on {one['node']} takes {one['ratio']} times as long as the median rank for its own "
            "part of a step"
            for one in found
        ]
        print(f"hpcaccel: step {step}: {'; '.join(texts) or 'no rank is slow any more'}", flush=True)

    def _node(self, rank: int) -> str:
        value = read_json(self._run.heartbeats(self._attempt) / f"{rank}.json")
        return from_dict(Beat, value).host if value else "an unknown node"
