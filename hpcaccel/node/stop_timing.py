"""How early before a time limit the ranks are stopped, and how long they may take to exit.

Both times depend on how long the ranks' steps and saves take (``Pace``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.launch_spec import RestartPolicy
from hpcaccel.core.rank_records import Timing, busy_seconds
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.errors import RunDirectoryError

__all__ = [
    "LEAVE_BEFORE_END_SECONDS",
    "Pace",
    "forecast",
    "lead_seconds",
    "patience_seconds",
    "read_pace",
    "warnings",
]

LEAVE_BEFORE_END_SECONDS = 15.0
"""Time reserved for the requeue, which must be complete when the scheduler kills the job. Once a stop has begun, at
most a quarter of the remaining time is reserved."""
MARGIN_SECONDS = 5.0
"""Added to the estimated time until the last rank's exit."""
MARGIN_OF_SAVE = 0.1
"""Fraction of the slowest save's duration that is added to the estimate, too."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Durations of steps and saves as measured by the ranks."""

    save_seconds: float
    """Duration of the slowest save so far, until its commit."""
    step_seconds: float
    slowest_step_seconds: float

    @property
    def needed_seconds(self) -> float:
        """Estimated time from the signal to the last rank's exit. A rank sees the stop at the end of a step, and all
        ranks agree on it in the next step; one of the two may be the slowest step."""
        steps = self.slowest_step_seconds + self.step_seconds
        return steps + self.save_seconds * (1 + MARGIN_OF_SAVE) + MARGIN_SECONDS


def read_pace(run: RunDir, attempt: int) -> Pace | None:
    """The pace of this attempt, or None if no save has been measured yet or ``timing.json`` cannot be read.

    Until the first save of an attempt, ``timing.json`` contains the slowest save of earlier attempts.
    """
    try:
        value = read_json(run.timing(attempt))
    except (OSError, RunDirectoryError):
        return None  # read again later; without a pace the spec's values apply
    if value is None:
        return None
    times = from_dict(Timing, value)
    # A background save takes longer until its commit than the time for which it blocks the training.
    committed = [busy_seconds(line) for line, _ in read_lines(run.saves(attempt)) if "seconds" in line]
    slowest = max([*committed, times.slowest_save_seconds or 0.0])
    if not slowest:
        return None
    step = times.step_seconds or 0.0
    return Pace(save_seconds=slowest, step_seconds=step, slowest_step_seconds=times.slowest_step_seconds or step)


def lead_seconds(pace: Pace | None, *, warning_seconds: float, limit_seconds: float) -> float:
    """How many seconds before the time limit the ranks are stopped: ``warning_seconds``, or longer if two steps and a
    save take longer. The longer time is at most half of the time limit (``limit_seconds``), to leave time to train."""
    if pace is None:
        return warning_seconds
    needed = pace.needed_seconds + LEAVE_BEFORE_END_SECONDS
    return max(warning_seconds, min(needed, limit_seconds / 2))


def patience_seconds(pace: Pace | None, *, stop_timeout_seconds: float, left_seconds: float | None) -> float:
    """How many seconds the ranks may take to exit after a request to stop: ``stop_timeout_seconds``, or longer if their
    saves take longer, but never so long that no time is left for the requeue.

    Args:
        left_seconds: time until the scheduler kills the job; None if the scheduler will not kill it.
    """
    patience = stop_timeout_seconds if pace is None else max(stop_timeout_seconds, pace.needed_seconds)
    if left_seconds is None:
        return patience
    # A job that Slurm has ended cannot be requeued any more. Losing the last save is the smaller loss.
    return min(patience, max(1.0, left_seconds - min(LEAVE_BEFORE_END_SECONDS, left_seconds / 4)))


def warnings(pace: Pace, limits: RestartPolicy, kill_wait_seconds: float | None) -> Iterator[str]:
    """Warnings for the log about slow saves, given after the first save."""
    if pace.needed_seconds + LEAVE_BEFORE_END_SECONDS > limits.warning_seconds:
        yield (
            f"two steps and a save may take {pace.needed_seconds:.0f} s: the ranks will be stopped at least that "
            "long before the time limit, but never before half of the job's time has passed"
        )
    if kill_wait_seconds is not None and pace.save_seconds > kill_wait_seconds:
        yield (
            f"a save took {pace.save_seconds:.0f} s, but in a preemption without grace time Slurm kills the ranks "
            f"after {kill_wait_seconds:.0f} s (KillWait): the run then resumes from the previous checkpoint"
        )


def forecast(pace: Pace | None, request: StopRequest) -> str:
    """A warning to append to the log message about a stop; empty unless less time is left than a save takes."""
    if request.deadline is None or pace is None or pace.save_seconds <= request.deadline - request.time:
        return ""
    left = max(0.0, request.deadline - request.time)
    return f"; a save took up to {pace.save_seconds:.0f} s, and {left:.0f} s are left: this save may not finish in time"
