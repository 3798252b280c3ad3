"""Time report of a run: effective training time, time by part, and the recommended checkpoint interval."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.attempt_steps import LoggedSteps
from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart, from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.attempts import Attempt, count, read_attempts
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.goodput import HELD, AttemptSpan, AttemptWork, add_up, between, split
from hpcaccel.view.goodput_without import Without, without_measures

__all__ = ["AttemptReport", "Interval", "TimeReport", "attempt_spans", "report"]

FAR_OFF = 2.0
"""A checkpoint interval longer or shorter than recommended by more than this factor is reported."""


@dataclass(frozen=True, kw_only=True)
class AttemptReport:
    """One attempt, including the time since the previous attempt or the submission."""

    attempt: int
    reason: str | None
    """Why the attempt ended; None while it is running, or if its end was not recorded."""
    seconds: dict[str, float]
    """Seconds by part; see ``goodput.PARTS``."""
    steps: int
    steps_lost: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The checkpoint interval with the least total cost of saves and lost steps (Young, 1974)."""

    saves: int
    save_cost_seconds: float
    """Mean time for which a periodic save blocks training; the mean over all saves if none was periodic."""
    interruptions: int
    """Attempts that failed, were lost, or lost steps."""
    seconds_between_interruptions: float | None
    """Mean time with nodes between interruptions; None without an interruption."""
    step_seconds: float
    suggested_seconds: float | None
    """The recommended interval, √(2 · save cost · time between interruptions); None if it cannot be computed."""
    suggested_steps: int | None
    present_seconds: float | None
    """The interval set in the spec; None if the run saves only when it stops or ends."""

    @property
    def far_off(self) -> bool:
        if self.suggested_seconds is None:
            return False
        if self.present_seconds is None:
            return True
        return not 1 / FAR_OFF <= self.present_seconds / self.suggested_seconds <= FAR_OFF

    def cost(self, seconds: float) -> float:
        """Share of the time that saves and lost steps cost at a checkpoint interval of ``seconds``."""
        assert self.seconds_between_interruptions is not None
        return self.save_cost_seconds / seconds + seconds / 2 / self.seconds_between_interruptions


@dataclass(frozen=True, kw_only=True)
class TimeReport:
    """Report on one run, or on all tasks of an array together."""

    run_id: str
    name: str
    state: str
    seconds: dict[str, float]
    """All time since the submission, by part; for an array, the sum of its tasks."""
    steps: int
    """Number of steps that were not lost."""
    steps_lost: int
    attempts: list[AttemptReport] = field(default_factory=list)
    interval: Interval | None = None
    """None for an array, or if no step time or no save was recorded."""
    without: list[Without] = field(default_factory=list)
    """The run without each of its measures against faults; empty for an array, and if the spec sets none."""
    tasks: list[TimeReport] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def held_seconds(self) -> float:
        """Time during which the run had nodes."""
        return sum(self.seconds[part] for part in HELD)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: share of the time since submission, excluding pauses, spent in training."""
        return _share(self.seconds["training"], self.total_seconds - self.seconds["paused"])

    @property
    def goodput(self) -> float | None:
        """Share of the time with nodes that was spent in training."""
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


def report(
    run: RunDir, status: RunStatus, *, now: float | None = None, attempts: Sequence[Attempt] | None = None
) -> TimeReport:
    """Compute the report on a run from its ``status`` and its directory.

    Args:
        attempts: the run's attempts, with their logged steps, if the caller has read them.
    """
    now = time.time() if now is None else now
    if status.tasks:
        return _together(status, [report(run.task(i), task, now=now) for i, task in enumerate(status.tasks)])
    if attempts is None:
        attempts = read_attempts(run, LoggedSteps.of(Logged(run).read()))
    known = [one for one in attempts if one.start is not None]
    newest = newest_saved(run, [one.end for one in known if one.end is not None])
    goes_on = not status.ended
    counts = count(known, goes_on=goes_on, newest_checkpoint=newest.step if newest else None)
    spans = attempt_spans(run, known, goes_on=goes_on, now=now)
    works = [split(span, kept=one.kept_until) for span, one in zip(spans, counts, strict=True)]
    waits = _waits(spans, created=read_record(run).created)
    reports = [
        AttemptReport(
            attempt=span.start.attempt,
            reason=None if span.end is None else span.end.reason,
            seconds=add_up([wait, work.seconds]),
            steps=one.done,
            steps_lost=one.lost,
        )
        for span, wait, work, one in zip(spans, waits, works, counts, strict=True)
    ]
    seconds = add_up([*(one.seconds for one in reports), _since(spans, run, status, now=now)])
    return TimeReport(
        run_id=status.run_id,
        name=status.name,
        state=status.state,
        seconds=seconds,
        steps=sum(one.done - one.lost for one in counts),
        steps_lost=sum(one.lost for one in counts),
        attempts=reports,
        interval=_interval(run, spans, works),
        without=without_measures(
            run, known, spans, works,
            training=seconds["training"],
            held=sum(seconds[part] for part in HELD),
            total=sum(seconds.values()) - seconds["paused"],
        ),
    )  # fmt: skip


def _together(status: RunStatus, tasks: list[TimeReport]) -> TimeReport:
    return TimeReport(
        run_id=status.run_id,
        name=status.name,
        state=status.state,
        seconds=add_up(task.seconds for task in tasks),
        steps=sum(task.steps for task in tasks),
        steps_lost=sum(task.steps_lost for task in tasks),
        tasks=tasks,
    )


# -- the attempts ---------------------------------------------------------------------------------------------------


def attempt_spans(run: RunDir, attempts: Sequence[Attempt], *, goes_on: bool, now: float) -> list[AttemptSpan]:
    """The spans of the attempts that have started, oldest first.

    Args:
        goes_on: whether the run has not ended, so that an attempt without an end line is still running.
        now: end of a running attempt.
    """
    return [_span(run, one, one.start, now, goes_on) for one in attempts if one.start is not None]


def _span(run: RunDir, attempt: Attempt, start: AttemptStart, now: float, goes_on: bool) -> AttemptSpan:
    value = read_json(run.timing(attempt.number))
    ended = now
    if attempt.end is not None:
        ended = start.time + attempt.end.seconds
    elif not goes_on:  # its batch step recorded no end: the end of the last training step is the last known time
        ended = attempt.steps.last_time or start.time
    return AttemptSpan(
        start=start,
        end=attempt.end,
        ended=ended,
        timing=None if value is None else from_dict(Timing, value),
        steps=attempt.steps,
    )


def _waits(spans: Sequence[AttemptSpan], *, created: float) -> list[dict[str, float]]:
    """The waiting time before each attempt, split into parts; see ``between``."""
    before: AttemptEnd | None = None
    left, waits = created, []
    for span in spans:
        waits.append(between(before, left, span.start))
        before, left = span.end, max(span.ended, span.start.time)
    return waits


def _since(spans: Sequence[AttemptSpan], run: RunDir, status: RunStatus, *, now: float) -> dict[str, float]:
    """Queue time since the last attempt if the run is waiting for nodes, else empty."""
    if status.ended or (spans and spans[-1].end is None):
        return {}
    left = spans[-1].ended if spans else read_record(run).created
    return {"queue": max(0.0, now - left)}


# -- how often to save ----------------------------------------------------------------------------------------------


def _interval(run: RunDir, spans: Sequence[AttemptSpan], works: Sequence[AttemptWork]) -> Interval | None:
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
    suggested = None if between_them is None or not cost else math.sqrt(2 * cost * between_them)
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


def _due_saves(run: RunDir, span: AttemptSpan) -> list[dict[str, Any]]:
    """Records of an attempt's periodic saves. Saves at a stop or at the end do not depend on the interval."""
    return [line for line, _ in read_lines(run.saves(span.start.attempt)) if line.get("reason") == "due"]


def _was_interrupted(span: AttemptSpan, work: AttemptWork) -> bool:
    return span.end is not None and (span.end.reason in ("failed", "lost") or work.steps > work.steps_kept)


def _present(run: RunDir, step_seconds: float) -> float | None:
    section: dict[str, Any] = (read_json(run.spec) or {}).get("spec", {}).get("checkpoint", {})
    known = []
    if section.get("every_steps"):
        known.append(section["every_steps"] * step_seconds)
    if section.get("every_minutes"):
        known.append(60.0 * section["every_minutes"])
    return min(known, default=None)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
