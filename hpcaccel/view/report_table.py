"""The report on a terminal: a line for each part, a column for each attempt, and how often to save."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from hpcaccel.view.formatting import clean, duration
from hpcaccel.view.goodput import PARTS
from hpcaccel.view.text_tables import Column, Styled, console_for, print_table
from hpcaccel.view.time_report import AttemptReport, Interval, Report

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
    _print_parts(one, console)
    if one.tasks:
        console.print()
        _print_tasks(one.tasks, console)
    for line in () if one.interval is None else interval_lines(one.interval):
        console.print(Text(line))


def _facts(one: Report) -> Iterator[str]:
    yield f"effective training time (ETTR): {_percent(one.ettr)} of {_time(one.total_seconds - one.seconds['paused'])}"
    yield f"goodput: {_percent(one.goodput)} of {_time(one.held_seconds)} with nodes"
    yield f"steps: {one.steps}, lost: {one.steps_lost}"


def _print_parts(one: Report, console: Console) -> None:
    newest = one.attempts[-SHOWN_ATTEMPTS:] if len(one.attempts) > 1 else []
    columns = (
        Column(title="PART"),
        Column(title="", leaves=0),
        Column(title="SHARE", right=True),
        Column(title="TOTAL", right=True),
        *(Column(title=f"#{attempt.attempt}", right=True, leaves=2 + place) for place, attempt in enumerate(newest)),
        Column(title="WHAT IT IS", wraps=24, leaves=1),
    )
    counted = one.total_seconds - one.seconds["paused"]
    rows: list[list[str | Styled]] = []
    for part, meaning in PARTS.items():
        seconds = one.seconds[part]
        if seconds <= 0:
            continue
        share = seconds / counted if part != "paused" and counted > 0 else None
        own = [_time(attempt.seconds[part]) if attempt.seconds[part] else "-" for attempt in newest]
        bar = "#" * round(BAR_WIDTH * (share or 0.0))
        rows.append([part.replace("_", " "), bar, _percent(share), _time(seconds), *own, meaning])
    totals = [_time(sum(attempt.seconds.values())) for attempt in newest]
    rows.append([Styled(cell, "bold") for cell in ("all", "", "", _time(one.total_seconds), *totals, "")])
    if newest:
        rows.append(["ended", "", "", "", *map(_reason, newest), ""])
    print_table(columns, rows, console=console)


def _reason(attempt: AttemptReport) -> str:
    return "goes on" if attempt.reason is None else attempt.reason.replace("_", " ")


def _print_tasks(tasks: Sequence[Report], console: Console) -> None:
    columns = (
        Column(title="RUN"),
        Column(title="STATE"),
        Column(title="ATTEMPTS", right=True, leaves=0),
        Column(title="ETTR", right=True),
        Column(title="GOODPUT", right=True, leaves=3),
        Column(title="STEPS", right=True, leaves=4),
        Column(title="LOST", right=True, leaves=2),
        Column(title="QUEUE", right=True, leaves=1),
        Column(title="ALL", right=True),
    )
    rows = []
    for task in tasks:
        numbers = (len(task.attempts), _percent(task.ettr), _percent(task.goodput), task.steps, task.steps_lost)
        times = (_time(task.seconds["queue"]), _time(task.total_seconds))
        rows.append([str(cell) for cell in (task.run_id, task.state, *numbers, *times)])
    print_table(columns, rows, console=console)


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
