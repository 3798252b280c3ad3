"""How long before the end the ranks must be asked to stop, from what their saves and steps have taken so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcaccel.core.records import StopRequest, Timing, from_dict
from hpcaccel.core.run_dir import RunDir, read_json, read_lines
from hpcaccel.errors import RunDirectoryError
from hpcaccel.node.launch_spec import Resilience

__all__ = ["LEAVE_BEFORE_END_SECONDS", "Pace", "forecast", "lead_seconds", "patience_seconds", "read_pace", "warnings"]

LEAVE_BEFORE_END_SECONDS = 15.0
"""For the requeue, which must be over when the scheduler kills the job. Of a short time a quarter."""
MARGIN_SECONDS = 5.0
MARGIN_OF_SAVE = 0.1


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the ranks have measured."""

    save_seconds: float
    """The slowest save until now, until it was committed."""
    step_seconds: float
    slowest_step_seconds: float

    @property
    def needed_seconds(self) -> float:
        """From the signal to the last rank's exit: a stop is heard at the end of a step and agreed on in the next one,
        of which one may be the slowest that there is."""
        steps = self.slowest_step_seconds + self.step_seconds
        return steps + self.save_seconds * (1 + MARGIN_OF_SAVE) + MARGIN_SECONDS


def read_pace(run: RunDir, attempt: int) -> Pace | None:
    """What this attempt's ranks have measured, or None where there was no save yet.

    An attempt that has not saved knows the slowest save of the one before it.
    """
    try:
        value = read_json(run.timing(attempt))
    except (OSError, RunDirectoryError):
        return None  # the next look finds it, or nothing is known and the spec's own figure counts
    if value is None:
        return None
    times = from_dict(Timing, value)
    # A save in the background takes longer until it is committed than the training stands still for it.
    committed = [line["seconds"] for line, _ in read_lines(run.saves(attempt)) if "seconds" in line]
    slowest = max([*committed, times.slowest_save_seconds or 0.0])
    if not slowest:
        return None
    step = times.step_seconds or 0.0
    return Pace(save_seconds=slowest, step_seconds=step, slowest_step_seconds=times.slowest_step_seconds or step)


def lead_seconds(pace: Pace | None, *, warning_seconds: float, limit_seconds: float) -> float:
    """How long before the end to ask: ``warning_seconds``, more where saves and steps take longer; never more than half
    of what the job was given, since a job that only saves gets nowhere."""
    if pace is None:
        return warning_seconds
    needed = pace.needed_seconds + LEAVE_BEFORE_END_SECONDS
    return max(warning_seconds, min(needed, limit_seconds / 2))


def patience_seconds(pace: Pace | None, *, stop_timeout_seconds: float, left_seconds: float | None) -> float:
    """How long ranks that were asked to stop may take before they are killed: longer than the spec says where their
    saves are known to take longer, but not so long that no time is left to requeue.

    Args:
        left_seconds: until the scheduler kills the job, None where it does not.
    """
    patience = stop_timeout_seconds if pace is None else max(stop_timeout_seconds, pace.needed_seconds)
    if left_seconds is None:
        return patience
    # A job that Slurm ends cannot be requeued any more: better to lose the ranks' last words.
    return min(patience, max(1.0, left_seconds - min(LEAVE_BEFORE_END_SECONDS, left_seconds / 4)))


def warnings(pace: Pace, limits: Resilience, kill_wait_seconds: float | None) -> Iterator[str]:
    """What the log should know of saves that take long, once the first one has been seen."""
    if pace.needed_seconds + LEAVE_BEFORE_END_SECONDS > limits.warning_seconds:
        yield (
            f"two steps and a save may take {pace.needed_seconds:.0f} s: before the time limit the ranks are asked to "
            "stop so much earlier (at most half of the limit)"
        )
    if kill_wait_seconds is not None and pace.save_seconds > kill_wait_seconds:
        yield (
            f"a save has taken {pace.save_seconds:.0f} s, and Slurm kills {kill_wait_seconds:.0f} s after a preemption "
            "without grace time (KillWait): the last checkpoint counts then"
        )


def forecast(pace: Pace | None, request: StopRequest) -> str:
    """Behind the word that the ranks are asked to stop: what will be lost where the time is too short."""
    if request.deadline is None or pace is None or pace.save_seconds <= request.deadline - request.time:
        return ""
    left = max(0.0, request.deadline - request.time)
    return f"; a save has taken up to {pace.save_seconds:.0f} s, and {left:.0f} s are left: the last one may have to do"
