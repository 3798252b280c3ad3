"""The life of a run as one bar: queued, starting, training, saving, lost, hung and paused, with times."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.formatting import counted
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.watch import describe_end
from hpcaccel.view.goodput import AttemptSpan
from hpcaccel.view.rank_states import read_hang

__all__ = ["LifePart", "life", "queued_since"]

MOST_SAVES = 100
"""Maximum number of saves of one attempt that are parts of their own: the longest ones."""
LEAST_SHARE = 0.001
"""Saves that take less than this share of their attempt belong to training: they would be invisible."""


@dataclass(frozen=True, kw_only=True)
class LifePart:
    """A part of the bar. Parts are in order and do not overlap. Times are seconds since the epoch."""

    part: str
    """``queued``, ``starting`` (from the allocation to the first step), ``training``, ``saving`` (training is blocked
    by a save, or the ranks save and exit), ``lost`` (its steps were lost, or the ranks had failed), ``hung`` or
    ``paused``."""
    started: float
    ended: float
    """The present time for the last part of an active run."""
    attempt: int
    """The attempt; before an attempt's start, the number of the attempt that follows."""
    text: str = ""
    """What happened, for users. The last part of an attempt includes how the attempt ended."""


def life(
    run: RunDir, status: RunStatus, spans: Sequence[AttemptSpan], kept: Sequence[int | None], *, created: float,
    now: float,
) -> list[LifePart]:  # fmt: skip
    """The parts of a run's life, oldest first.

    Args:
        spans: the attempts that have started.
        kept: for each of them, the last step that was not lost; None if no step was lost.
        created: when the run was submitted.
    """
    parts: list[LifePart] = []
    left: float = created
    before: AttemptEnd | None = None
    for span, until in zip(spans, kept, strict=True):
        parts += _before(left, before, span)
        parts += _attempt(run, span, until)
        left, before = max(span.ended, span.start.time), span.end
    parts += _since(run, status, spans, created, now)
    return _tidy(parts)


def _before(left: float, before: AttemptEnd | None, span: AttemptSpan) -> Iterator[LifePart]:
    """The time from the submission, or the end of an attempt, to the start of the next one."""
    start, number = span.start, span.start.attempt
    if before is not None and before.decision == "restart":
        yield LifePart(part="starting", started=left, ended=start.time, attempt=number, text="restart in place")
        return
    at = left
    if before is not None and before.decision in ("pause", "end"):
        resumed = start.queued_at if start.queued_at is not None else start.allocated_at
        at = max(at, min(start.time, start.time if resumed is None else resumed))
        yield LifePart(part="paused", started=left, ended=at, attempt=number, text="paused")
    nodes = start.time if start.allocated_at is None else max(at, min(start.time, start.allocated_at))
    yield LifePart(part="queued", started=at, ended=nodes, attempt=number, text="waiting for nodes")
    yield LifePart(part="starting", started=nodes, ended=start.time, attempt=number, text="setup of the job")


def _attempt(run: RunDir, span: AttemptSpan, kept: int | None) -> list[LifePart]:
    number, began, ended = span.start.attempt, span.start.time, max(span.start.time, span.ended)
    first = _first_step_began(span)
    if first is None:  # without timing, the program reports no steps: it may have trained from the beginning
        part = "training" if span.timing is None else "starting"
        text = _steps_text(span.steps.from_step, span.steps.last_step) if span.timing is None else _resumed(span)
        found = [LifePart(part=part, started=began, ended=ended, attempt=number, text=text)]
    else:
        last = min(ended, max(first, ended if span.end is None else span.steps.last_time or first))
        found = [LifePart(part="starting", started=began, ended=first, attempt=number, text=_resumed(span))]
        found += _steps(run, span, first, last, kept)
        found.append(_leaving(run, span, last, ended))
    found = [one for one in found if one.ended > one.started] or found[-1:]
    if span.end is not None and found:
        how = describe_end(span.end)
        found[-1] = replace(found[-1], text=f"attempt {number} {how}")
    return found


def _first_step_began(span: AttemptSpan) -> float | None:
    timing = span.timing
    if timing is None or timing.first_step_time is None:
        return None
    usual = timing.step_seconds or 0.0
    return max(span.start.time, timing.first_step_time - timing.stall_before_first_step - usual)


def _resumed(span: AttemptSpan) -> str:
    step = span.steps.from_step
    return f"resumed from step {step}" if step else "imports, model and data"


def _steps(run: RunDir, span: AttemptSpan, first: float, last: float, kept: int | None) -> list[LifePart]:
    """The loop of an attempt: training with its saves, and the steps at its end that were lost."""
    saves = [line for line, _ in read_lines(run.saves(span.start.attempt))]
    since, lost_text = last, ""
    began, reached = span.steps.from_step, span.steps.last_step
    if kept is not None and began is not None and reached is not None and reached > max(kept, began):
        since = _time_of_step(max(kept, began), began, reached, first, last, saves)
        lost_text = f"{counted(reached - max(kept, began), 'step')} lost, {_steps_text(max(kept, began), reached)}"
    number = span.start.attempt
    found = []
    at = first
    for begin, end, step in _shown_saves(saves, first, last):
        if begin > at:
            found.append(LifePart(part="training", started=at, ended=begin, attempt=number))
        text = f"save of step {step}"
        found.append(LifePart(part="saving", started=max(at, begin), ended=end, attempt=number, text=text))
        at = end
    found.append(LifePart(part="training", started=at, ended=last, attempt=number))
    text = _steps_text(began, reached)
    found = [replace(one, text=text) if one.part == "training" else one for one in found]
    return _with_lost(found, since, lost_text)


def _with_lost(parts: list[LifePart], since: float, text: str) -> list[LifePart]:
    """``parts`` with everything after ``since`` lost, if ``text`` is not empty."""
    if not text:
        return parts
    found = []
    for one in parts:
        if one.ended <= since:
            found.append(one)
            continue
        if one.started < since:
            found.append(replace(one, ended=since))
        found.append(replace(one, part="lost", started=max(since, one.started), text=text))
    return found


def _shown_saves(saves: Sequence[dict[str, Any]], first: float, last: float) -> list[tuple[float, float, int]]:
    """Begin, end and step of the saves that blocked training long enough to be visible, in order."""
    known = []
    for line in saves:
        stall, end, step = line.get("stall_seconds") or 0.0, line.get("time") or 0.0, line.get("step")
        if line.get("background"):  # blocked only at the start of the save
            end = end - (line.get("seconds") or 0.0) + stall
        begin, end = max(first, end - stall), min(last, end)
        if isinstance(step, int) and end - begin > LEAST_SHARE * (last - first):
            known.append((begin, end, step))
    longest = sorted(known, key=lambda one: one[0] - one[1])[:MOST_SAVES]
    found: list[tuple[float, float, int]] = []
    for begin, end, step in sorted(longest):
        begin = max(begin, found[-1][1]) if found else begin
        if end > begin:
            found.append((begin, end, step))
    return found


def _time_of_step(
    step: int, began: int, reached: int, first: float, last: float, saves: Sequence[dict[str, Any]]
) -> float:
    """When ``step`` was complete: the time of its save, else interpolated."""
    for line in saves:
        if line.get("step") == step and line.get("time"):
            return min(last, max(first, float(line["time"])))
    return first + (last - first) * (step - began) / max(1, reached - began)


def _leaving(run: RunDir, span: AttemptSpan, last: float, ended: float) -> LifePart:
    """The time from the last step to the end of an attempt."""
    number = span.start.attempt
    if span.end is None or span.end.reason not in ("failed", "lost"):
        text = "saving and leaving" if span.end is not None else ""
        return LifePart(part="saving", started=last, ended=ended, attempt=number, text=text)
    hung = span.end.reason == "failed" and read_hang(run, number) is not None
    return LifePart(part="hung" if hung else "lost", started=last, ended=ended, attempt=number)


def queued_since(run: RunDir, spans: Sequence[AttemptSpan], created: float, now: float) -> float:
    """Since when a waiting run has been in the queue: since its submission, the end of its last attempt or, if it had
    been paused, about since its resume (the last write of its record)."""
    if not spans:
        return created
    left, end = max(spans[-1].ended, spans[-1].start.time), spans[-1].end
    if end is None or end.decision not in ("pause", "end"):
        return left
    try:
        return min(max(left, os.stat(run.record).st_mtime), max(left, now))
    except OSError:
        return left


def _since(run: RunDir, status: RunStatus, spans: Sequence[AttemptSpan], created: float, now: float) -> list[LifePart]:
    """The time since the last attempt, if the run waits or is starting. The pause of a paused run is not shown before
    its end: the bar would become a long pause with the rest too short to see."""
    left = max(spans[-1].ended, spans[-1].start.time) if spans else created
    number = 1 + (spans[-1].start.attempt if spans else 0)
    if status.state in ("pending", "requeued"):
        since = queued_since(run, spans, created, now)
        text = status.detail or "waiting for nodes"
        pause = [LifePart(part="paused", started=left, ended=since, attempt=number, text="paused")]
        queue = LifePart(part="queued", started=since, ended=now, attempt=number, text=text)
        return [*(pause if since > left else []), queue]
    if status.state == "starting" and (not spans or spans[-1].end is not None):
        return [LifePart(part="starting", started=left, ended=now, attempt=number, text="setup of the job")]
    return []


def _steps_text(began: int | None, reached: int | None) -> str:
    if reached is None:
        return ""
    return f"steps {began + 1} to {reached}" if began is not None and reached > began else f"step {reached}"


def _tidy(parts: list[LifePart]) -> list[LifePart]:
    """``parts`` without empty ones and without overlaps. Equal neighbours of one attempt are joined. An attempt's last
    part is kept even if it is empty: its text contains how the attempt ended."""
    found: list[LifePart] = []
    for one in parts:
        started = max(one.started, found[-1].ended) if found else one.started
        one = replace(one, started=started, ended=max(started, one.ended))
        same = bool(found) and (found[-1].part, found[-1].attempt) == (one.part, one.attempt)
        if same and found[-1].text in ("", one.text):
            found[-1] = replace(one, started=found[-1].started)
        elif one.ended > one.started or one.text.startswith("attempt "):
            found.append(one)
    return found
