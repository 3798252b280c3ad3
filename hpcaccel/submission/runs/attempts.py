"""Attempts of a run, read from its ledger, and the values that they logged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.core.attempt_steps import AttemptSteps, LoggedSteps, StepCount, count_steps, read_steps
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.metrics_reader import Line, Logged
from hpcaccel.core.rank_records import Progress
from hpcaccel.core.records import AttemptEnd, AttemptStart, from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger

__all__ = [
    "LOSS",
    "Attempt",
    "Metrics",
    "count",
    "current_step",
    "read_attempts",
    "read_progress",
    "total_steps",
]

LOSS = "loss"
"""The metric that is shown as the training's loss."""
LOSS_TAIL = 100
"""Maximum number of the newest losses that are kept."""
PACE_WINDOW = 50
"""Maximum number of logged lines from which the pace of a run is computed."""


@dataclass
class Metrics:
    """Values logged in ``run``. ``read`` reads new lines and updates the attributes."""

    run: RunDir
    first: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Lowest step and its value, for each name."""
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Step and value written last, for each name."""
    last_step: dict[int, int] = field(default_factory=dict)
    """The step logged last in each attempt."""
    logged: dict[int, LoggedSteps] = field(default_factory=dict)
    """The lowest and the highest step logged in each attempt."""
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))
    """The newest lines of the newest attempt."""
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSS_TAIL))
    """Steps and values of the newest finite losses, in the order of the steps."""

    def __post_init__(self) -> None:
        self._logged = Logged(self.run)

    def read(self, *, into: list[Line] | None = None) -> None:
        """Read the lines added since the last call.

        Args:
            into: a list to which the lines are appended.
        """
        for line in self._logged.lines():
            if into is not None:
                into.append(line)
            LoggedSteps.of((line,), before=self.logged)
            self._take(line)

    @property
    def warning(self) -> str:
        """Message about invalid lines of ``$HPCACCEL_METRICS``; empty if there are none."""
        return self._logged.warning

    def _take(self, line: Line) -> None:
        self.last_step[line.attempt] = line.step
        if self.recent and self.recent[-1].attempt > line.attempt:
            return  # written late, by an attempt that is no longer the newest
        for name, value in line.values.items():
            if name not in self.first or line.step <= self.first[name][0]:
                self.first[name] = (line.step, value)
            self.last[name] = (line.step, value)
        if self.recent and self.recent[-1].attempt != line.attempt:
            self.recent.clear()
        if math.isfinite(loss := line.values.get(LOSS, math.nan)):
            while self.losses and self.losses[-1][0] >= line.step:
                self.losses.pop()  # repeated by a later attempt
            self.losses.append((line.step, loss))
        self.recent.append(line)

    @property
    def step(self) -> int | None:
        """The step logged last."""
        return self.recent[-1].step if self.recent else None

    def seconds_per_step(self) -> float | None:
        """The pace of the newest attempt; None before it has logged two different steps."""
        if len(self.recent) < 2:
            return None
        steps = self.recent[-1].step - self.recent[0].step
        seconds = self.recent[-1].time - self.recent[0].time
        return seconds / steps if steps > 0 and seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run; ``end`` is None while the attempt is running, or if its batch step died."""

    number: int
    start: AttemptStart | None
    end: AttemptEnd | None
    progress: Progress | None
    steps: AttemptSteps

    @property
    def resumed_step(self) -> int | None:
        """The step that the attempt resumed from (0 at the start of the training); None if unknown."""
        return self.steps.from_step

    @property
    def resumed_from_memory(self) -> bool:
        """Whether the attempt resumed from a snapshot in the memory of its nodes, not from a checkpoint."""
        return self.progress is not None and self.progress.resumed_from == "memory"

    @property
    def origin(self) -> str:
        """The resumed step, and whether its state came from memory, for display; empty if unknown."""
        if self.resumed_step is None:
            return ""
        return f"{self.resumed_step} (memory)" if self.resumed_from_memory else str(self.resumed_step)


def read_attempts(run: RunDir, logged: Mapping[int, LoggedSteps] | None = None) -> list[Attempt]:
    """All attempts in the ledger, oldest first.

    Args:
        logged: logged steps by attempt (``Metrics.logged``), which supplement the steps in the attempts' files.
    """
    logged = logged or {}
    ledger = RunLedger.read(run)
    return [
        Attempt(
            number=number,
            start=ledger.start_of(number),
            end=(end := ledger.end_of(number)),
            progress=read_progress(run, number),
            steps=read_steps(run, number, logged.get(number), end=end),
        )
        for number in ledger.attempts
    ]


def read_progress(run: RunDir, attempt: int) -> Progress | None:
    value: dict[str, Any] | None = read_json(run.progress(attempt))
    return None if value is None else from_dict(Progress, value)


def total_steps(attempts: Sequence[Attempt]) -> int | None:
    """Total number of steps, from the newest attempt with a progress record; None if unknown."""
    return next((a.progress.total_steps for a in reversed(attempts) if a.progress is not None), None)


def current_step(attempts: Sequence[Attempt], metrics: Metrics) -> int | None:
    """The step that a run has reached: the last step of the newest attempt whose steps are known or, if that attempt
    has completed none, the step that it resumed from. None if no step is known."""
    for attempt in reversed(attempts):
        known = [attempt.steps.last_step, metrics.last_step.get(attempt.number)]
        reached = max((step for step in known if step is not None), default=attempt.steps.from_step)
        if reached is not None:
            return reached
    return metrics.step


def count(attempts: Sequence[Attempt], *, goes_on: bool, newest_checkpoint: int | None = None) -> list[StepCount]:
    """Completed and lost steps of each attempt; see ``attempt_steps.count_steps``."""
    known = [(attempt.start, attempt.end, attempt.steps) for attempt in attempts]
    return count_steps(known, goes_on=goes_on, newest_checkpoint=newest_checkpoint)
