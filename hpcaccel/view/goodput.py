"""Where the seconds of a run went: each one belongs to exactly one part.

Pure functions of what the ledger and rank 0 have written down; ``report`` gathers that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcaccel.core.attempt_steps import AttemptSteps
from hpcaccel.core.records import AttemptEnd, AttemptStart, Timing

__all__ = ["HELD", "PARTS", "Span", "Work", "add_up", "between", "split"]

PARTS: dict[str, str] = {
    "training": "steps that count",
    "slow": "what those steps took beyond the median, evaluation between them included",
    "stall": "training stood still for saves",
    "lost": "steps that were done again",
    "queue": "waiting for nodes",
    "launch": "set-up, start of the processes",
    "imports": "until Accelerator()",
    "meeting": "until all ranks had met",
    "build": "model, data, prepare()",
    "load": "loading a checkpoint",
    "first_step": "the first step, beyond a median one: compiling, warming up",
    "leaving": "from the last step to the exit, without its save",
    "hang": "from the last sign of life to the end of an attempt that failed",
    "untold": "a program without hpcaccel.Accelerator says nothing of its steps",
    "paused": "nobody had asked for it to go on; part of no ratio",
}
"""What the time went into, and what each part means."""

HELD = tuple(part for part in PARTS if part not in ("queue", "paused"))
"""Parts in which nodes were held."""

Seconds = dict[str, float]

_STOPPED = ("completed", "pruned", "preempted", "time_limit", "stop", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Span:
    """One attempt, from the start of its ranks to their end; ``ended`` is now for one that goes on."""

    start: AttemptStart
    end: AttemptEnd | None
    ended: float
    timing: Timing | None
    steps: AttemptSteps


@dataclass(frozen=True, kw_only=True)
class Work:
    """The steps of one attempt, and where its time went."""

    seconds: Seconds
    steps: int = 0
    steps_kept: int = 0
    step_seconds: float | None = None


def between(before: AttemptEnd | None, left: float, start: AttemptStart) -> Seconds:
    """The time from ``left``, when an attempt ended or the run was submitted, to the start of the next one."""
    if before is not None and before.decision == "restart":
        return {"launch": max(0.0, start.time - left)}
    parts = _Parts(left, max(left, start.time))
    if before is not None and before.decision in ("pause", "end"):
        parts.until("paused", start.queued_at if start.queued_at is not None else start.allocated_at)
    parts.until("queue", start.time if start.allocated_at is None else start.allocated_at)
    parts.until("launch", start.time)
    return parts.seconds


def split(span: Span, *, kept: int | None) -> Work:
    """Where the time of one attempt went.

    Args:
        kept: the step up to which its work counts; None: all of it.
    """
    parts = _Parts(span.start.time, max(span.start.time, span.ended))
    times = span.timing
    if times is None:
        parts.until("untold", span.ended)
        return Work(seconds=parts.seconds)
    parts.until("launch", times.process_started)
    parts.until("imports", times.imported)
    parts.until("meeting", times.formed)
    if times.first_step_time is None:
        _never_began(parts, span, times)
        return Work(seconds=parts.seconds)
    parts.until("build", times.prepared)
    parts.until("load", times.loaded)
    return _loop(parts, span, times, kept=kept)


def _never_began(parts: _Parts, span: Span, times: Timing) -> None:
    """It ended while it was starting: in whatever it was about to do."""
    parts.until("build", times.prepared if times.prepared is not None else span.ended)
    parts.until("load", times.loaded if times.loaded is not None else span.ended)
    parts.until("first_step", span.ended)


def _loop(parts: _Parts, span: Span, times: Timing, *, kept: int | None) -> Work:
    assert times.first_step_time is not None
    began = times.resumed_step if span.steps.from_step is None else span.steps.from_step
    last = began + 1 if span.steps.last_step is None else span.steps.last_step
    last_time = times.first_step_time if span.steps.last_time is None else span.steps.last_time
    steps = max(1, last - began)
    usual = times.step_seconds
    if usual is None:  # there was but one step
        usual = max(0.0, times.first_step_time - parts.at - times.stall_before_first_step)
    # A script that never asks for a checkpoint goes on building until it trains.
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
    parts.until(_what_came_last(span), span.ended)
    return Work(seconds=parts.seconds, steps=steps, steps_kept=count, step_seconds=times.step_seconds)


def _what_came_last(span: Span) -> str:
    if span.end is None:
        return "training"  # the step that it is in
    return "leaving" if span.end.reason in _STOPPED else "hang"


def add_up(several: Iterable[Seconds]) -> Seconds:
    """All of them together, in the order of ``PARTS``, with every part."""
    total = dict.fromkeys(PARTS, 0.0)
    for seconds in several:
        for part, value in seconds.items():
            total[part] += value
    return total


class _Parts:
    """Shares out the time from ``at`` to ``end``, from front to back; marks that lie behind count as none."""

    def __init__(self, at: float, end: float) -> None:
        self.at = at
        self._end = end
        self.seconds: Seconds = {}

    def until(self, part: str, moment: float | None) -> None:
        if moment is not None:
            self.add(part, self.take(moment))

    def take(self, moment: float) -> float:
        """Go on to ``moment``; how long that was."""
        moment = min(self._end, max(self.at, moment))
        took, self.at = moment - self.at, moment
        return took

    def add(self, part: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
