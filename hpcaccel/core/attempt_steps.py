"""Where each attempt of a run began, how far it came, and which of its steps count.

The only place where that is found out: the ledger's lines, the caps, ``status`` and ``report`` all read it here, so
that they cannot disagree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.core.metrics_reader import Line
from hpcaccel.core.records import AttemptEnd, AttemptStart, Beat, Outcome, Progress, Timing, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir, read_json, write_json
from hpcaccel.errors import RunDirectoryError

__all__ = ["STEP_COUNTER", "AttemptSteps", "LoggedSteps", "StepCount", "complete_timing", "count_steps", "read_steps"]

_NOTHING_LOST = ("completed", "pruned")
STEP_COUNTER = struct.Struct("<qdqd")
"""The file of the last step: the step and when it was done (seconds since the epoch), twice, so that a reader that
meets a half-written file sees that the two differ."""
LOOKS = 5
"""At a counter that is just being written: the two differ then, for some nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """The steps that one attempt has logged values for. Times are seconds since the epoch."""

    first: int
    last: int
    last_time: float
    counted: bool = False
    """No line named a step: the numbers are those of the lines."""

    @classmethod
    def of(cls, lines: Iterable[Line], *, before: dict[int, LoggedSteps] | None = None) -> dict[int, LoggedSteps]:
        """By attempt; ``before`` holds what earlier lines said, and is added to."""
        found = {} if before is None else before
        for line in lines:
            old = found.get(line.attempt)
            if old is None:
                found[line.attempt] = cls(first=line.step, last=line.step, last_time=line.time, counted=line.counted)
            else:
                found[line.attempt] = old._with(line)
        return found

    def _with(self, line: Line) -> LoggedSteps:
        first = min(self.first, line.step)
        if self.counted != line.counted:  # the one that is named counts
            first = line.step if self.counted else self.first
        last, last_time = max((self.last, self.last_time), (line.step, line.time))
        return LoggedSteps(first=first, last=last, last_time=last_time, counted=self.counted and line.counted)


@dataclass(frozen=True, kw_only=True)
class AttemptSteps:
    """What is known of one attempt."""

    from_step: int | None = None
    """The step that it went on from, 0 at the start of the training; None where its loop never began, and for programs
    that do not tell."""
    last_step: int | None = None
    """The last optimizer step that it is known to have done."""
    last_time: float | None = None
    """About when that step was over (seconds since the epoch)."""
    first_logged: int | None = None
    """The first step that it has logged a value for."""

    @property
    def done(self) -> int:
        """How many steps it has done, as far as is known."""
        if self.from_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.from_step)


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """The steps of one attempt: how many it did, and how many of these no checkpoint held, so that they had to be, or
    must be, done again."""

    done: int
    lost: int
    kept_until: int | None
    """The step up to which its work counts; None: all of it."""


def read_steps(
    run: RunDir, attempt: int, logged: LoggedSteps | None = None, *, end: AttemptEnd | None = None
) -> AttemptSteps:
    """What the files of an attempt tell of its steps.

    Args:
        logged: what its program has logged.
        end: its line in the ledger, for what the files do not tell.
    """
    progress, timing, outcome = (
        _read(Progress, run.progress(attempt)),
        _read(Timing, run.timing(attempt)),
        _read(Outcome, run.outcome(attempt)),
    )
    first_logged = None if logged is None else logged.first
    known = [] if logged is None else [(logged.last, logged.last_time)]
    if logged is not None and logged.counted and outcome is not None:
        # The outcome tells the step, and the lines only how many they are.
        first_logged, known = None, [(outcome.step, logged.last_time)]
    if timing is not None and timing.last_step is not None:
        known.append((timing.last_step, timing.last_step_time or 0.0))
    if (counted := read_counter(run, attempt)) is not None:
        known.append(counted)
    elif (beaten := _by_heartbeat(run, attempt, timing, max(known, default=None))) is not None:
        known.append(beaten)
    last_step, last_time = max(known, default=(None, None))
    told = [last_step, None if outcome is None else outcome.step, None if end is None else end.last_step]
    last_step = max((step for step in told if step is not None), default=None)
    from_step = _from_step(progress, timing, outcome)
    if from_step is None and end is not None and end.last_step is not None:
        from_step = end.resumed_step
    return AttemptSteps(
        from_step=from_step,
        last_step=last_step,
        last_time=last_time or None,
        first_logged=first_logged,
    )


def complete_timing(run: RunDir, attempt: int) -> None:
    """Write the last step into the ``timing.json`` of an attempt that has ended: rank 0 wrote it some seconds before it
    was killed.

    Raises:
        OSError: it cannot be written.
    """
    timing, steps = _read(Timing, run.timing(attempt)), read_steps(run, attempt)
    if timing is None or steps.last_step is None or steps.last_step <= (timing.last_step or 0):
        return
    write_json(run.timing(attempt), to_dict(replace(timing, last_step=steps.last_step, last_step_time=steps.last_time)))


def _from_step(progress: Progress | None, timing: Timing | None, outcome: Outcome | None) -> int | None:
    if progress is not None:
        return progress.resumed_step
    if timing is None:
        return None
    if timing.loaded is not None or timing.first_step_time is not None:
        return timing.resumed_step
    return None if outcome is None else outcome.step  # stopped while it was starting


def _by_heartbeat(
    run: RunDir, attempt: int, timing: Timing | None, before: tuple[int, float] | None
) -> tuple[int, float] | None:
    """What rank 0's last heartbeat says, where the training was made by a release that did not count in a file. It
    beats also while nothing moves on, so the time of the step is reckoned from those before."""
    beat = _read(Beat, run.heartbeats(attempt) / "0.json")
    if beat is None or timing is None or before is None or beat.step <= before[0]:
        return None
    return beat.step, min(beat.time, before[1] + (beat.step - before[0]) * (timing.step_seconds or 0.0))


def read_counter(run: RunDir, attempt: int) -> tuple[int, float] | None:
    """The last step that rank 0 has counted, and when; also of a rank that was killed right after it."""
    for _ in range(LOOKS):
        try:
            *first, step, when = STEP_COUNTER.unpack(run.step_counter(attempt).read_bytes())
            if step and first == [step, when]:
                return step, when
        except (OSError, struct.error):
            return None  # none was done yet, or the program does not use the runtime
    return None


def _read(kind: type[Any], path: Any) -> Any:
    try:
        value = read_json(path)
        return None if value is None else from_dict(kind, value)
    except (OSError, RunDirectoryError, TypeError):
        return None  # damaged: the other files tell


def count_steps(
    attempts: Sequence[tuple[AttemptStart | None, AttemptEnd | None, AttemptSteps]],
    *,
    goes_on: bool,
    newest_checkpoint: int | None = None,
) -> list[StepCount]:
    """For each attempt, oldest first, how many steps it did and how many of them are lost.

    Work is undone when a later attempt begins at an earlier step. What the last one did since its last checkpoint is
    lost as well once it has ended, unless it completed the training, or a sweep had seen enough of it.

    Args:
        goes_on: whether the run has not ended, so that an attempt without an end is still at work.
        newest_checkpoint: the step of the newest checkpoint on disk.
    """
    found: list[StepCount] = []
    later: int | None = None
    for start, end, steps in reversed(attempts):
        kept = later
        if later is None and end is not None and end.reason not in _NOTHING_LOST:
            kept = end.checkpoint_step or 0
        if later is None and end is None and not goes_on:
            kept = newest_checkpoint or (None if start is None else start.checkpoint_step) or 0
        count = steps.done
        if kept is not None and steps.from_step is not None:
            count = max(0, min(count, kept - steps.from_step))
        found.insert(0, StepCount(done=steps.done, lost=steps.done - count, kept_until=kept))
        if steps.from_step is not None and (steps.done or end is None):
            later = steps.from_step if later is None else min(later, steps.from_step)
    return found
