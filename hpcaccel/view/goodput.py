"""Splits a run's time into parts; each second belongs to exactly one part.

These functions are pure: ``time_report`` reads their arguments from the ledger and from rank 0's records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcaccel.core.attempt_steps import AttemptSteps
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart

__all__ = ["HELD", "PARTS", "AttemptSpan", "AttemptWork", "add_up", "between", "split"]

PARTS: dict[str, str] = {
    "training": "steps that contribute to the result, at their median time",
    "slow": "time of these steps above the median, including evaluation between steps",
    "stall": "training was blocked by saves",
    "lost": "steps that were lost, at their median time",
    "queue": "waiting for nodes",
    "launch": "setup and start of the processes",
    "imports": "imports, until Accelerator() or stop_gate() is called",
    "meeting": "until all ranks are connected",
    "build": "model, data, prepare()",
    "load": "loading a checkpoint",
    "first_step": "time of the first step above the median: compilation, warm-up",
    "leaving": "from the last step to the exit, excluding saves",
    "hang": "from the last step of a failed attempt to its end",
    "untold": "not known: without Accelerator() or stop_gate(), steps are not reported",
    "paused": "stopped until it was resumed; excluded from all ratios",
}
"""The parts and their meaning."""

HELD = tuple(part for part in PARTS if part not in ("queue", "paused"))
"""Parts during which the run had nodes."""

Seconds = dict[str, float]

_STOPPED = ("completed", "pruned", "preempted", "time_limit", "stop", "cancelled")


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """One attempt, from the start of its ranks to their end; ``ended`` is the current time while they run."""

    start: AttemptStart
    end: AttemptEnd | None
    ended: float
    timing: Timing | None
    steps: AttemptSteps


@dataclass(frozen=True, kw_only=True)
class AttemptWork:
    """The steps of one attempt, and its time by part."""

    seconds: Seconds
    steps: int = 0
    steps_kept: int = 0
    step_seconds: float | None = None


def between(before: AttemptEnd | None, left: float, start: AttemptStart) -> Seconds:
    """Parts of the time from ``left`` (the submission or the end of an attempt) to the start of the next attempt."""
    if before is not None and before.decision == "restart":
        return {"launch": max(0.0, start.time - left)}
    parts = _Parts(left, max(left, start.time))
    if before is not None and before.decision in ("pause", "end"):
        parts.until("paused", start.queued_at if start.queued_at is not None else start.allocated_at)
    parts.until("queue", start.time if start.allocated_at is None else start.allocated_at)
    parts.until("launch", start.time)
    return parts.seconds


def split(span: AttemptSpan, *, kept: int | None) -> AttemptWork:
    """Split the time of one attempt.

    Args:
        kept: the last step that was not lost; None if no step was lost.
    """
    parts = _Parts(span.start.time, max(span.start.time, span.ended))
    times = span.timing
    if times is None:
        parts.until("untold", span.ended)
        return AttemptWork(seconds=parts.seconds)
    parts.until("launch", times.process_started)
    parts.until("imports", times.imported)
    parts.until("meeting", times.formed)
    if times.first_step_time is None:
        _never_began(parts, span, times)
        return AttemptWork(seconds=parts.seconds)
    parts.until("build", times.prepared)
    parts.until("load", times.loaded)
    return _loop(parts, span, times, kept=kept)


def _never_began(parts: _Parts, span: AttemptSpan, times: Timing) -> None:
    """Assign the remaining time of an attempt without a complete step to the phases that the attempt reached."""
    parts.until("build", times.prepared if times.prepared is not None else span.ended)
    parts.until("load", times.loaded if times.loaded is not None else span.ended)
    parts.until("first_step", span.ended)


def _loop(parts: _Parts, span: AttemptSpan, times: Timing, *, kept: int | None) -> AttemptWork:
    assert times.first_step_time is not None
    began = times.resumed_step if span.steps.from_step is None else span.steps.from_step
    last = began + 1 if span.steps.last_step is None else span.steps.last_step
    last_time = times.first_step_time if span.steps.last_time is None else span.steps.last_time
    steps = max(1, last - began)
    usual = times.step_seconds
    if usual is None:  # there was only one step
        usual = max(0.0, times.first_step_time - parts.at - times.stall_before_first_step)
    # An Accelerator records ``prepared`` only if the script tries to load a checkpoint. Otherwise "build" lasts until
    # the first step.
    first = "build" if times.prepared is None else "first_step"
    parts.until(first, times.first_step_time - times.stall_before_first_step - usual)
    loop = parts.take(last_time)
    stall = min(loop, max(0.0, times.stall_seconds - times.stall_after_last_step))
    usual = min(usual, (loop - stall) / steps)
    count = steps if kept is None else max(0, min(steps, kept - began))
    parts.add("stall", stall)
    parts.add("training", count * usual)
    parts.add("lost", (steps - count) * usual)
    parts.add("slow", loop - stall - steps * usual)
    parts.until("stall", parts.at + times.stall_after_last_step)
    parts.until(_last_part(span), span.ended)
    return AttemptWork(seconds=parts.seconds, steps=steps, steps_kept=count, step_seconds=times.step_seconds)


def _last_part(span: AttemptSpan) -> str:
    if span.end is None:
        return "training"  # the current step
    return "leaving" if span.end.reason in _STOPPED else "hang"


def add_up(several: Iterable[Seconds]) -> Seconds:
    """The sum of several splits. It has all parts, in the order of ``PARTS``."""
    total = dict.fromkeys(PARTS, 0.0)
    for seconds in several:
        for part, value in seconds.items():
            total[part] += value
    return total


class _Parts:
    """Splits the time from ``at`` to ``end`` into parts, in order. ``at`` advances; moments before it add nothing."""

    def __init__(self, at: float, end: float) -> None:
        self.at = at
        self._end = end
        self.seconds: Seconds = {}

    def until(self, part: str, moment: float | None) -> None:
        if moment is not None:
            self.add(part, self.take(moment))

    def take(self, moment: float) -> float:
        """Advance to ``moment``, and return the elapsed seconds."""
        moment = min(self._end, max(self.at, moment))
        took, self.at = moment - self.at, moment
        return took

    def add(self, part: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
