"""The attempts of a run, as its ledger tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.attempt_steps import AttemptSteps, LoggedSteps, StepCount, count_steps, read_steps
from hpcaccel.core.records import AttemptEnd, AttemptStart, Progress, StopRequest, from_dict
from hpcaccel.core.run_dir import RunDir, read_json, read_lines
from hpcaccel.view.metrics_follower import Metrics

__all__ = ["Attempt", "count", "current_step", "read_attempts", "read_progress", "read_requests", "total_steps"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's ranks; ``end`` is None while it goes on (or when its batch step died without a word)."""

    number: int
    start: AttemptStart | None
    end: AttemptEnd | None
    progress: Progress | None
    steps: AttemptSteps

    @property
    def resumed_step(self) -> int | None:
        """The step that this attempt went on from; None when its loop never began, as far as is known."""
        return self.steps.from_step


def read_attempts(run: RunDir, logged: Mapping[int, LoggedSteps] | None = None) -> list[Attempt]:
    """All attempts that the ledger knows, oldest first.

    Args:
        logged: the steps that each has logged values for, where somebody has read them.
    """
    logged = logged or {}
    starts: dict[int, AttemptStart] = {}
    ends: dict[int, AttemptEnd] = {}
    for line, _ in read_lines(run.ledger):
        if line.get("event") == "start":
            starts[line["attempt"]] = from_dict(AttemptStart, line)
        elif line.get("event") == "end":
            ends[line["attempt"]] = from_dict(AttemptEnd, line)
    return [
        Attempt(
            number=number,
            start=starts.get(number),
            end=ends.get(number),
            progress=read_progress(run, number),
            steps=read_steps(run, number, logged.get(number), end=ends.get(number)),
        )
        for number in sorted({*starts, *ends})
    ]


def read_progress(run: RunDir, attempt: int) -> Progress | None:
    value: dict[str, Any] | None = read_json(run.progress(attempt))
    return None if value is None else from_dict(Progress, value)


def read_requests(run: RunDir) -> list[StopRequest]:
    """What people asked of the run (``control/``), oldest first, honoured or not."""
    found = [read_json(path) for path in run.control.glob("[!.]*.json")]
    return sorted((from_dict(StopRequest, value) for value in found if value), key=lambda request: request.time)


def total_steps(attempts: Sequence[Attempt]) -> int | None:
    """How many steps the newest attempt that knows it is going to take."""
    return next((a.progress.total_steps for a in reversed(attempts) if a.progress is not None), None)


def current_step(attempts: Sequence[Attempt], metrics: Metrics) -> int | None:
    """The last step of the newest attempt that tells of one; where it has done none yet, the one it goes on from."""
    for attempt in reversed(attempts):
        known = [attempt.steps.last_step, metrics.last_step.get(attempt.number)]
        reached = max((step for step in known if step is not None), default=attempt.steps.from_step)
        if reached is not None:
            return reached
    return metrics.step


def count(attempts: Sequence[Attempt], *, goes_on: bool, newest_checkpoint: int | None = None) -> list[StepCount]:
    """For each attempt how many steps it did, and how many of them are lost: see ``attempt_steps.count_steps``."""
    known = [(attempt.start, attempt.end, attempt.steps) for attempt in attempts]
    return count_steps(known, goes_on=goes_on, newest_checkpoint=newest_checkpoint)
