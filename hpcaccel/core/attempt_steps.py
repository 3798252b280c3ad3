"""First and last step of each attempt, and how many of its steps were lost.

Ledger, caps, ``status`` and ``report`` all use the figures that are computed here, so that these agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.metrics_reader import Line
from hpcaccel.core.rank_records import Beat, Outcome, Progress, Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.step_counter import read_counter
from hpcaccel.errors import RunDirectoryError

__all__ = ["AttemptSteps", "LoggedSteps", "StepCount", "complete_timing", "count_steps", "read_steps"]

_NOTHING_LOST = ("completed", "pruned")
"""End reasons after which the steps since the last checkpoint do not count as lost."""


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """The steps for which one attempt logged values. Times are seconds since the epoch."""

    first: int
    last: int
    last_time: float
    counted: bool = False
    """Whether no line had a step, so that ``first`` and ``last`` are line numbers."""

    @classmethod
    def of(cls, lines: Iterable[Line], *, before: dict[int, LoggedSteps] | None = None) -> dict[int, LoggedSteps]:
        """Logged steps by attempt. ``before`` holds the result for earlier lines and is updated."""
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
        if self.counted != line.counted:  # an explicit step takes precedence over a line number
            first = line.step if self.counted else self.first
        last, last_time = max((self.last, self.last_time), (line.step, line.time))
        return LoggedSteps(first=first, last=last, last_time=last_time, counted=self.counted and line.counted)


@dataclass(frozen=True, kw_only=True)
class AttemptSteps:
    """First and last step of one attempt, as recorded in its files."""

    from_step: int | None = None
    """The step that the attempt resumed from (0 at the start of the training); None if unknown."""
    last_step: int | None = None
    """The last step known to be complete."""
    last_time: float | None = None
    """Approximate end of the last step, in seconds since the epoch."""
    first_logged: int | None = None
    """The first step with a logged value."""

    @property
    def done(self) -> int:
        """Number of steps known to be complete."""
        if self.from_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.from_step)


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """Steps that one attempt completed, and how many of them were lost because no checkpoint contains them."""

    done: int
    lost: int
    kept_until: int | None
    """The attempt's steps after this step are lost; None if no step is lost."""


def read_steps(
    run: RunDir, attempt: int, logged: LoggedSteps | None = None, *, end: AttemptEnd | None = None
) -> AttemptSteps:
    """First and last step of an attempt, from its files.

    Args:
        logged: the steps for which the attempt's program logged values.
        end: the attempt's end line in the ledger; its steps supplement those in the files.
    """
    progress, timing, outcome = (
        _read(Progress, run.progress(attempt)),
        _read(Timing, run.timing(attempt)),
        _read(Outcome, run.outcome(attempt)),
    )
    first_logged = None if logged is None else logged.first
    known = [] if logged is None else [(logged.last, logged.last_time)]
    if logged is not None and logged.counted and outcome is not None:
        # The outcome has the optimizer step; the lines have only line numbers.
        first_logged, known = None, [(outcome.step, logged.last_time)]
    if timing is not None and timing.last_step is not None:
        known.append((timing.last_step, timing.last_step_time or 0.0))
    if (counted := read_counter(run, attempt)) is not None:
        known.append(counted)
    elif (beaten := _by_heartbeat(run, attempt, timing, max(known, default=None))) is not None:
        known.append(beaten)
    last_step, last_time = max(known, default=(None, None))
    reported = [last_step, None if outcome is None else outcome.step, None if end is None else end.last_step]
    last_step = max((step for step in reported if step is not None), default=None)
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
    """Bring the last step in a killed attempt's ``timing.json`` up to date: rank 0 writes the file only now and then.

    Raises:
        OSError: the file cannot be written.
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
    """The step in rank 0's last heartbeat, and an estimate of when this step ended. For attempts of releases without a
    step counter.

    A heartbeat may be later than the end of its step, so the end is extrapolated, with the median step time, from
    ``before``: the last step known from other files, and its time. None if the heartbeat's step is not a later one.
    """
    beat = _read(Beat, run.heartbeats(attempt) / "0.json")
    if beat is None or timing is None or before is None or beat.step <= before[0]:
        return None
    return beat.step, min(beat.time, before[1] + (beat.step - before[0]) * (timing.step_seconds or 0.0))


def _read(kind: type[Any], path: Any) -> Any:
    try:
        value = read_json(path)
        return None if value is None else from_dict(kind, value)
    except (OSError, RunDirectoryError, TypeError):
        return None  # damaged: the other files are enough


def count_steps(
    attempts: Sequence[tuple[AttemptStart | None, AttemptEnd | None, AttemptSteps]],
    *,
    goes_on: bool,
    newest_checkpoint: int | None = None,
) -> list[StepCount]:
    """Completed and lost steps of each attempt, oldest first.

    Steps are lost when a later attempt begins at an earlier step. Steps of the last attempt after its last checkpoint
    are lost once it has ended, unless it completed the training or was pruned.

    Args:
        goes_on: whether the run has not ended, so that an attempt without an end line is still running.
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
