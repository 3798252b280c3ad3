"""What the ranks logged, read a little at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hpcaccel.core.attempt_steps import LoggedSteps
from hpcaccel.core.metrics_reader import Line, Logged
from hpcaccel.core.run_dir import RunDir

__all__ = ["Metrics"]

PACE_WINDOW = 50
"""Number of logged lines from which the pace of a run is told."""


@dataclass
class Metrics:
    """What was logged in ``run``. ``read`` takes in what is new; the attributes tell what is known so far."""

    run: RunDir
    first: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The value of the lowest step, with that step, for each name."""
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The value that was written last, with its step, for each name."""
    last_step: dict[int, int] = field(default_factory=dict)
    """The last step of each attempt."""
    logged: dict[int, LoggedSteps] = field(default_factory=dict)
    """The first and the largest step of each attempt."""
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))
    """The newest lines of the newest attempt."""

    def __post_init__(self) -> None:
        self._logged = Logged(self.run)

    def read(self) -> list[Line]:
        """Take in the lines that were added since the last call, and return them."""
        added = self._logged.read()
        LoggedSteps.of(added, before=self.logged)
        for line in added:
            self._take(line)
        return added

    @property
    def warning(self) -> str:
        """Which lines of ``$HPCACCEL_METRICS`` were of no use and why; empty where all were good."""
        return self._logged.warning

    def _take(self, line: Line) -> None:
        self.last_step[line.attempt] = line.step
        if self.recent and self.recent[-1].attempt > line.attempt:
            return  # the last words of an attempt that another one has followed
        for name, value in line.values.items():
            if name not in self.first or line.step <= self.first[name][0]:
                self.first[name] = (line.step, value)
            self.last[name] = (line.step, value)
        if self.recent and self.recent[-1].attempt != line.attempt:
            self.recent.clear()
        self.recent.append(line)

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
