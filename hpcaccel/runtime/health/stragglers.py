"""Ranks that are slower than the others, although all take the same time for a step, since each waits for the slowest.

What differs is the time until a rank first waits for others. With DDP that is all from the end of a step to the
backward pass: data, the forward pass, and what the script does in between. With sharded models the forward pass waits
too, so that only the time until the batch has come is a rank's own. On a GPU it is the device's time, of some steps.

The median of some steps travels in the agreement on stopping, which goes round anyway. Nobody waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.core.records import Beat, from_dict
from hpcaccel.core.run_dir import RunDir, append_line, read_json

if TYPE_CHECKING:
    import torch

__all__ = ["OwnTime", "StragglerWatch", "slow_ranks"]

EVERY_STEPS = 50
RATIO = 1.2
"""A rank that takes so many times the median is slow ..."""
SHARE = 0.05
"""... if that costs the others at least this part of a step."""
TIMES = 2
"""So often in a row, before anybody is told."""
SAMPLE_STEPS = 5
"""On GPUs the events of every fifth step are recorded."""


class OwnTime:
    """What this rank measures of itself, and what it has heard of all.

    Args:
        device: the rank's; on a GPU the time is the device's.
        until_batch: the rank's own time ends when the batch has come, as the forward pass waits for other ranks.
    """

    def __init__(self, device: torch.device, *, until_batch: bool) -> None:
        self.until_batch = until_batch
        self.heard: tuple[int, list[int], float] | None = None
        """Step, microseconds of every rank (0: not measured), seconds a step: for the heartbeat's thread to read."""
        self._batch_at = 0.0
        self._on_device = device.type == "cuda" and not until_batch
        self._since = 0.0
        self._times: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        self._open: Any = None
        self._steps = 0
        self._window = 0.0
        self.step_seconds = 0.0

    def step_is_over(self) -> None:
        self._steps += 1
        if not self._window:
            self._window = time.perf_counter()
        if not self._on_device:
            self._since = time.perf_counter()
            self._batch_at = 0.0
        elif self._steps % SAMPLE_STEPS == 0:
            self._open = _event()

    def batch_has_come(self) -> None:
        if self._since and not self._batch_at:
            self._batch_at = time.perf_counter()

    def forget(self) -> None:
        """The step was over only when its time had run for a while."""
        self._since, self._open = 0.0, None

    def backward_begins(self) -> None:
        if self._since:
            end = self._batch_at if self.until_batch else time.perf_counter()
            if end:
                self._times.append(end - self._since)
            self._since = 0.0
        elif self._open is not None:
            self._events.append((self._open, _event()))
            self._open = None

    def take(self) -> int:
        """The median since the last call, in microseconds; 0 where nothing was measured."""
        now = time.perf_counter()
        self.step_seconds = (now - self._window) / max(1, self._steps)
        self._window, self._steps = now, 0
        for begin, end in self._events:
            if end.query():
                self._times.append(begin.elapsed_time(end) / 1000)
        times, self._times, self._events = self._times, [], []
        return min(int(_median(times) * 1e6), 2**31 - 1) if times else 0

    def hear(self, step: int, times: list[int]) -> None:
        self.heard = (step, times, self.step_seconds)


def _median(values: Sequence[float]) -> float:
    """The lower one of two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def slow_ranks(microseconds: Sequence[int], step_seconds: float) -> dict[int, float]:
    """Ranks that keep the others waiting, with how many times the median they take.

    Of two ranks the faster one is the median.
    """
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
    """On rank 0, outside of the training thread: tells the log and ``stragglers.jsonl`` when slow ranks come or go."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._last: object = None
        self._counts: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self, own: OwnTime | None) -> None:
        heard = None if own is None else own.heard
        if heard is None or heard is self._last:
            return
        self._last = heard
        step, times, step_seconds = heard
        slow = slow_ranks(times, step_seconds)
        self._counts = {rank: self._counts.get(rank, 0) + 1 for rank in slow}
        lasting = {rank for rank, count in self._counts.items() if count >= TIMES}
        # Whoever was told of stays so until it is as fast as the others once.
        lasting |= self._told & set(slow)
        if lasting != self._told:
            self._told = lasting
            self._tell(step, {rank: slow[rank] for rank in sorted(lasting)}, times, step_seconds)

    def _tell(self, step: int, slow: dict[int, float], times: list[int], step_seconds: float) -> None:
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
            print(f"hpcaccel: slow ranks could not be noted: {error}", file=sys.stderr, flush=True)
        words = [
            f"rank {one['rank']} on {one['node']} takes {one['ratio']} times as long as others for its part of a step"
            for one in found
        ]
        print(f"hpcaccel: step {step}: {'; '.join(words) or 'no rank is slower than the others any more'}", flush=True)

    def _node(self, rank: int) -> str:
        value = read_json(self._run.heartbeats(self._attempt) / f"{rank}.json")
        return from_dict(Beat, value).host if value else "an unknown node"
