"""The report on a terminal: a line for each part, a column for each attempt, and how often to save."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from hpcaccel.view.goodput import PARTS
from hpcaccel.view.report import AttemptReport, Interval, Report
from hpcaccel.view.tables import console_for
from hpcaccel.view.words import clean, duration

__all__ = ["interval_lines", "print_report"]

BAR_WIDTH = 24
SHOWN_ATTEMPTS = 8
"""Of more, the newest: the total holds all of them."""


def print_report(one: Report, *, stream: TextIO | None = None) -> None:
    console = console_for(sys.stdout if stream is None else stream)
    console.print(Text(f"{clean(one.name)} {one.run_id}: {one.state}", style="bold"))
    for line in _facts(one):
        console.print(Text(f"  {line}"))
    console.print()
    console.print(_parts(one))
    if one.tasks:
        console.print()
        console.print(_tasks(one.tasks))
    for line in () if one.interval is None else interval_lines(one.interval):
        console.print(Text(line))


def _facts(one: Report) -> Iterator[str]:
    yield f"effective training time (ETTR): {_percent(one.ettr)} of {_time(one.total_seconds - one.seconds['paused'])}"
    yield f"goodput: {_percent(one.goodput)} of {_time(one.held_seconds)} with nodes"
    yield f"steps: {one.steps}, lost: {one.steps_lost}"


def _parts(one: Report) -> Table:
    newest = one.attempts[-SHOWN_ATTEMPTS:] if len(one.attempts) > 1 else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("PART", "", "SHARE", "TOTAL", *(f"#{attempt.attempt}" for attempt in newest), "WHAT IT IS"):
        left = title in ("PART", "", "WHAT IT IS")
        table.add_column(title, justify="left" if left else "right", no_wrap=title != "WHAT IT IS")
    counted = one.total_seconds - one.seconds["paused"]
    for part, meaning in PARTS.items():
        seconds = one.seconds[part]
        if seconds <= 0:
            continue
        share = seconds / counted if part != "paused" and counted > 0 else None
        own = [_time(attempt.seconds[part]) if attempt.seconds[part] else "-" for attempt in newest]
        bar = "#" * round(BAR_WIDTH * (share or 0.0))
        cells = (part.replace("_", " "), bar, _percent(share), _time(seconds), *own, meaning)
        table.add_row(*map(Text, cells))
    totals = [_time(sum(attempt.seconds.values())) for attempt in newest]
    table.add_row(*map(Text, ("all", "", "", _time(one.total_seconds), *totals, "")), style="bold")
    if newest:
        table.add_row(*map(Text, ("ended", "", "", "", *map(_reason, newest), "")))
    return table


def _reason(attempt: AttemptReport) -> str:
    return "goes on" if attempt.reason is None else attempt.reason.replace("_", " ")


def _tasks(tasks: Sequence[Report]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("RUN", "STATE", "ATTEMPTS", "ETTR", "GOODPUT", "STEPS", "LOST", "QUEUE", "ALL"):
        table.add_column(title, justify="left" if title in ("RUN", "STATE") else "right")
    for task in tasks:
        numbers = (len(task.attempts), _percent(task.ettr), _percent(task.goodput), task.steps, task.steps_lost)
        times = (_time(task.seconds["queue"]), _time(task.total_seconds))
        table.add_row(*(Text(str(cell)) for cell in (task.run_id, task.state, *numbers, *times)))
    return table


def interval_lines(interval: Interval) -> Iterator[str]:
    """How often to save, and from which numbers that follows."""
    yield ""
    numbers = f"{interval.saves} saves, for each of which training stood still for {_time(interval.save_cost_seconds)}"
    if interval.suggested_seconds is None or interval.seconds_between_interruptions is None:
        yield f"how often to save: nothing has interrupted this run so far ({numbers})"
        return
    yield (
        f"how often to save: every {interval.suggested_steps} steps ({_time(interval.suggested_seconds)}) would "
        f"cost least, {_percent(interval.cost(interval.suggested_seconds))} of the time"
    )
    often = "interruption" if interval.interruptions == 1 else "interruptions"
    yield (
        f"  from {numbers}; {interval.interruptions} {often}, one in "
        f"{_time(interval.seconds_between_interruptions)} with nodes; {interval.step_seconds:.3g} s a step"
    )
    if interval.far_off:
        yield f"  {_present(interval)}"


def _present(interval: Interval) -> str:
    if interval.present_seconds is None:
        return "now it saves at the end only: set checkpoint.every_steps"
    steps = round(interval.present_seconds / interval.step_seconds)
    share = _percent(min(1.0, interval.cost(interval.present_seconds)))
    often = "far too often" if interval.present_seconds < (interval.suggested_seconds or 0) else "far too rarely"
    return (
        f"now it saves {often}, every {steps} steps, which costs {share}: set checkpoint.every_steps to "
        f"{interval.suggested_steps}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
