"""How much of a run's time became training, where the rest went, and how often it should save."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.attempt_steps import LoggedSteps
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.records import AttemptEnd, AttemptStart, Timing, from_dict
from hpcaccel.core.run_dir import RunDir, read_json, read_lines
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.status import RunStatus
from hpcaccel.view.attempts import Attempt, count, read_attempts
from hpcaccel.view.goodput import HELD, Span, Work, add_up, between, split

__all__ = ["AttemptReport", "Interval", "Report", "report"]

FAR_OFF = 2.0
"""An interval that is longer or shorter by more than this factor deserves a word."""


@dataclass(frozen=True, kw_only=True)
class AttemptReport:
    """One attempt, with the time since the one before it."""

    attempt: int
    reason: str | None
    """None while it goes on."""
    seconds: dict[str, float]
    """By part, see ``goodput.PARTS``."""
    steps: int
    steps_lost: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often to save: so that saves and lost steps together cost least (Young, 1974)."""

    saves: int
    save_cost_seconds: float
    """For how long training stands still, on average."""
    interruptions: int
    """Attempts that failed, were lost, or had to leave without a save."""
    seconds_between_interruptions: float | None
    """With nodes, on average; None while there was no interruption."""
    step_seconds: float
    suggested_seconds: float | None
    """√(2 · save cost · time between interruptions)"""
    suggested_steps: int | None
    present_seconds: float | None
    """As the spec has it; None: it does not save in between."""

    @property
    def far_off(self) -> bool:
        if self.suggested_seconds is None:
            return False
        if self.present_seconds is None:
            return True
        return not 1 / FAR_OFF <= self.present_seconds / self.suggested_seconds <= FAR_OFF

    def cost(self, seconds: float) -> float:
        """The share of the time that an interval of so many seconds costs, saves and lost steps together."""
        assert self.seconds_between_interruptions is not None
        return self.save_cost_seconds / seconds + seconds / 2 / self.seconds_between_interruptions


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of one run, or of all tasks of an array together."""

    run_id: str
    name: str
    state: str
    seconds: dict[str, float]
    """All time since the submission, by part."""
    steps: int
    """That count."""
    steps_lost: int
    attempts: list[AttemptReport] = field(default_factory=list)
    interval: Interval | None = None
    """None where no step or no save is known."""
    tasks: list[Report] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def held_seconds(self) -> float:
        """For how long it had nodes."""
        return sum(self.seconds[part] for part in HELD)

    @property
    def ettr(self) -> float | None:
        """Effective training time: the share of all time since the submission, without pauses."""
        return _share(self.seconds["training"], self.total_seconds - self.seconds["paused"])

    @property
    def goodput(self) -> float | None:
        """The share of the time with nodes."""
        return _share(self.seconds["training"], self.held_seconds)

    def to_json(self) -> dict[str, Any]:
        derived = {
            "total_seconds": self.total_seconds,
            "held_seconds": self.held_seconds,
            "ettr": self.ettr,
            "goodput": self.goodput,
        }
        plain = {**asdict(self), **derived, "tasks": [task.to_json() for task in self.tasks]}
        if self.interval is not None:
            plain["interval"]["far_off"] = self.interval.far_off
        return plain


def report(run: RunDir, status: RunStatus, *, now: float | None = None) -> Report:
    """Gather what the run directory says about a run whose ``status`` is known."""
    now = time.time() if now is None else now
    if status.tasks:
        return _together(status, [report(run.task(i), task, now=now) for i, task in enumerate(status.tasks)])
    known = [one for one in read_attempts(run, LoggedSteps.of(Logged(run).read())) if one.start is not None]
    newest, goes_on = checkpoint_files.newest(run.checkpoints), not status.ended
    counts = count(known, goes_on=goes_on, newest_checkpoint=newest.step if newest else None)
    spans = [_span(run, one, one.start, now, goes_on) for one in known if one.start is not None]
    works = [split(span, kept=one.kept_until) for span, one in zip(spans, counts, strict=True)]
    waits = _waits(spans, created=read_record(run).created)
    attempts = [
        AttemptReport(
            attempt=span.start.attempt,
            reason=None if span.end is None else span.end.reason,
            seconds=add_up([wait, work.seconds]),
            steps=one.done,
            steps_lost=one.lost,
        )
        for span, wait, work, one in zip(spans, waits, works, counts, strict=True)
    ]
    return Report(
        run_id=status.run_id,
        name=status.name,
        state=status.state,
        seconds=add_up([*(one.seconds for one in attempts), _since(spans, run, status, now=now)]),
        steps=sum(one.done - one.lost for one in counts),
        steps_lost=sum(one.lost for one in counts),
        attempts=attempts,
        interval=_interval(run, spans, works),
    )


def _together(status: RunStatus, tasks: list[Report]) -> Report:
    return Report(
        run_id=status.run_id,
        name=status.name,
        state=status.state,
        seconds=add_up(task.seconds for task in tasks),
        steps=sum(task.steps for task in tasks),
        steps_lost=sum(task.steps_lost for task in tasks),
        tasks=tasks,
    )


# -- the attempts ---------------------------------------------------------------------------------------------------


def _span(run: RunDir, attempt: Attempt, start: AttemptStart, now: float, goes_on: bool) -> Span:
    value = read_json(run.timing(attempt.number))
    ended = now
    if attempt.end is not None:
        ended = start.time + attempt.end.seconds
    elif not goes_on:  # its batch step is gone without a word: nothing later than its last step is known
        ended = attempt.steps.last_time or start.time
    return Span(
        start=start,
        end=attempt.end,
        ended=ended,
        timing=None if value is None else from_dict(Timing, value),
        steps=attempt.steps,
    )


def _waits(spans: Sequence[Span], *, created: float) -> list[dict[str, float]]:
    """What went before each attempt."""
    before: AttemptEnd | None = None
    left, waits = created, []
    for span in spans:
        waits.append(between(before, left, span.start))
        before, left = span.end, max(span.ended, span.start.time)
    return waits


def _since(spans: Sequence[Span], run: RunDir, status: RunStatus, *, now: float) -> dict[str, float]:
    """The time since the last attempt of a run that waits for its nodes."""
    if status.ended or (spans and spans[-1].end is None):
        return {}
    left = spans[-1].ended if spans else read_record(run).created
    return {"queue": max(0.0, now - left)}


# -- how often to save ----------------------------------------------------------------------------------------------


def _interval(run: RunDir, spans: Sequence[Span], works: Sequence[Work]) -> Interval | None:
    steps = [(work.step_seconds, work.steps) for work in works if work.step_seconds]
    timings = [span.timing for span in spans if span.timing is not None and span.timing.saves]
    if not steps or not timings:
        return None
    step_seconds = sum(seconds * count for seconds, count in steps) / sum(count for _, count in steps)
    saves = sum(one.saves for one in timings)
    due = [line["stall_seconds"] for span in spans for line in _due_saves(run, span)]
    cost = sum(due) / len(due) if due else sum(one.stall_seconds for one in timings) / saves
    interruptions = sum(_was_interrupted(span, work) for span, work in zip(spans, works, strict=True))
    held = sum(max(0.0, span.ended - span.start.time) for span in spans)
    between_them = held / interruptions if interruptions else None
    suggested = None if between_them is None else math.sqrt(2 * cost * between_them)
    return Interval(
        saves=saves,
        save_cost_seconds=cost,
        interruptions=interruptions,
        seconds_between_interruptions=between_them,
        step_seconds=step_seconds,
        suggested_seconds=suggested,
        suggested_steps=None if suggested is None else max(1, round(suggested / step_seconds)),
        present_seconds=_present(run, step_seconds),
    )


def _due_saves(run: RunDir, span: Span) -> list[dict[str, Any]]:
    """Those at a stop or at the end are made in any case, and nothing trains beside them."""
    return [line for line, _ in read_lines(run.saves(span.start.attempt)) if line.get("reason") == "due"]


def _was_interrupted(span: Span, work: Work) -> bool:
    return span.end is not None and (span.end.reason in ("failed", "lost") or work.steps > work.steps_kept)


def _present(run: RunDir, step_seconds: float) -> float | None:
    wishes: dict[str, Any] = (read_json(run.spec) or {}).get("spec", {}).get("checkpoint", {})
    known = []
    if wishes.get("every_steps"):
        known.append(wishes["every_steps"] * step_seconds)
    if wishes.get("every_minutes"):
        known.append(60.0 * wishes["every_minutes"])
    return min(known, default=None)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
