"""``StepTimes``: median and maximum of the durations of an attempt's steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

__all__ = ["StepTimes", "median_of"]

SAMPLE = 512
"""Number of durations in a sample at which every second duration is dropped."""


class StepTimes:
    """Median and maximum of many durations. The median is computed from a sample of fewer than ``SAMPLE`` evenly spaced
    durations.

    ``end_at`` only appends to an array; durations are computed when they are read.
    """

    __slots__ = ("_begun", "_count", "_ends", "_largest", "_sample", "_stride", "end_at")

    def __init__(self) -> None:
        self._largest = 0.0
        self._sample: list[float] = []
        self._stride = 1
        self._count = 0
        self._begun = 0.0
        self._ends = array("d")
        self.end_at: Callable[[float], None] = self._ends.append
        """Record that a step has ended, and the next one begins, by ``time.monotonic``."""

    def begin_at(self, now: float) -> None:
        """Record that a step begins. The time since the end of the last one does not count."""
        self._take_ends()
        self._begun = now

    def add(self, seconds: float) -> None:
        """Record a duration."""
        self._take_ends()
        self._take(seconds)

    @property
    def last_end(self) -> float:
        """When the last step ended, or the next one began."""
        self._take_ends()
        return self._begun

    @property
    def largest(self) -> float:
        """0 if there is none."""
        self._take_ends()
        return self._largest

    @property
    def median(self) -> float | None:
        self._take_ends()
        return median_of(self._sample) if self._sample else None

    def _take_ends(self) -> None:
        for end in self._ends:
            self._take(end - self._begun)
            self._begun = end
        del self._ends[:]

    def _take(self, seconds: float) -> None:
        self._largest = max(self._largest, seconds)
        self._count += 1
        if self._count % self._stride == 0:
            self._sample.append(seconds)
            if len(self._sample) == SAMPLE:
                del self._sample[::2]
                self._stride *= 2


def median_of(values: Sequence[float]) -> float:
    """The median of at least one value."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
