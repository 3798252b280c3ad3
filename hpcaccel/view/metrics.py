"""What the ranks logged, read a little at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.rundir import read_lines

__all__ = ["Metric", "Metrics"]

PACE_WINDOW = 50
"""Number of logged lines from which the pace of a run is told."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    step: int
    attempt: int
    time: float
    values: dict[str, float]


@dataclass
class Metrics:
    """The tail of a ``metrics.jsonl``. ``read`` takes in what is new; the attributes tell what is known so far."""

    path: Path
    offset: int = 0
    first: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The value of the lowest step, with that step, for each name."""
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The value that was written last, with its step, for each name."""
    last_step: dict[int, int] = field(default_factory=dict)
    """The last step of each attempt."""
    recent: deque[Metric] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))
    """The newest lines of the newest attempt."""

    def read(self) -> list[Metric]:
        """Take in the lines that were added since the last call, and return them."""
        added = []
        for line, behind in read_lines(self.path, offset=self.offset):
            self.offset = behind
            metric = _metric(line)
            if metric is not None:
                self._take(metric)
                added.append(metric)
        return added

    def _take(self, metric: Metric) -> None:
        for name, value in metric.values.items():
            if name not in self.first or metric.step <= self.first[name][0]:
                self.first[name] = (metric.step, value)
            self.last[name] = (metric.step, value)
        self.last_step[metric.attempt] = metric.step
        if self.recent and self.recent[-1].attempt != metric.attempt:
            self.recent.clear()
        self.recent.append(metric)

    @property
    def step(self) -> int | None:
        """The step that was logged last."""
        return self.recent[-1].step if self.recent else None

    def seconds_per_step(self) -> float | None:
        """The pace of the newest attempt, or None while two different steps are not known."""
        if len(self.recent) < 2:
            return None
        steps = self.recent[-1].step - self.recent[0].step
        seconds = self.recent[-1].time - self.recent[0].time
        return seconds / steps if steps > 0 and seconds > 0 else None


def _metric(line: dict[str, Any]) -> Metric | None:
    """The metric of one line; None where a line of another kind got into the file."""
    step, attempt, time, values = (line.get(key) for key in ("step", "attempt", "time", "values"))
    if not (isinstance(step, int) and isinstance(attempt, int) and isinstance(time, int | float)):
        return None
    numbers = {
        str(name): float(value)
        for name, value in (values if isinstance(values, dict) else {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Metric(step=step, attempt=attempt, time=float(time), values=numbers)
