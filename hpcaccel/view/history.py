"""The attempts of a run, as its ledger tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.records import AttemptEnd, AttemptStart, Progress, StopRequest, from_dict
from hpcaccel.rundir import RunDir, read_json, read_lines

__all__ = ["Attempt", "read_attempts", "read_progress", "read_requests", "steps_lost", "total_steps"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's ranks; ``end`` is None while it goes on (or when its batch step died without a word)."""

    number: int
    start: AttemptStart | None
    end: AttemptEnd | None
    progress: Progress | None

    @property
    def resumed_step(self) -> int | None:
        """The step that this attempt went on from; None when its loop never began, as far as is known."""
        if self.progress is not None:
            return self.progress.resumed_step
        if self.end is not None and self.end.last_step is not None:
            return self.end.resumed_step
        return None


def read_attempts(run: RunDir) -> list[Attempt]:
    """All attempts that the ledger knows, oldest first."""
    starts: dict[int, AttemptStart] = {}
    ends: dict[int, AttemptEnd] = {}
    for line, _ in read_lines(run.ledger):
        if line.get("event") == "start":
            starts[line["attempt"]] = from_dict(AttemptStart, line)
        elif line.get("event") == "end":
            ends[line["attempt"]] = from_dict(AttemptEnd, line)
    return [
        Attempt(number=number, start=starts.get(number), end=ends.get(number), progress=read_progress(run, number))
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


def steps_lost(attempts: Sequence[Attempt], last_logged: Mapping[int, int] | None = None) -> int:
    """Optimizer steps that were done and had to be done again, because no checkpoint held them.

    Args:
        last_logged: the last step in the metrics of each attempt; it can be later than what the ledger knows.
    """
    last_logged = last_logged or {}
    lost = 0
    reached = 0
    for attempt in attempts:
        if attempt.resumed_step is not None:
            lost += max(0, reached - attempt.resumed_step)
            reached = attempt.resumed_step
        ended_at = (attempt.end.last_step if attempt.end is not None else None) or 0
        reached = max(reached, ended_at, last_logged.get(attempt.number, 0))
    return lost
