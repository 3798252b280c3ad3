"""Prints a time report: a row for each part, a column for each attempt, and the recommended checkpoint interval."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from hpcaccel.core.formatting import clean, percent, precise_duration
from hpcaccel.view.goodput import PARTS
from hpcaccel.view.text_tables import Column, Styled, console_for, print_table
from hpcaccel.view.time_report import AttemptReport, Interval, TimeReport

__all__ = ["interval_lines", "print_report", "without_rows"]

BAR_WIDTH = 24
SHOWN_ATTEMPTS = 8
"""At most this many attempts, the newest ones, get a column of their own. The total includes all attempts."""


def print_report(one: TimeReport, *, stream: TextIO | None = None) -> None:
    console = console_for(sys.stdout if stream is None else stream)
    console.print(Text(f"{clean(one.name)} {one.run_id}: {one.state}", style="bold"))
    for line in _facts(one):
        console.print(Text(f"  {line}"))
    console.print()
    _print_parts(one, console)
    if one.tasks:
        console.print()
        _print_tasks(one.tasks, console)
    if one.without:
        console.print()
        _print_without(one, console)
    for line in () if one.interval is None else interval_lines(one.interval):
        console.print(Text(line))


def _facts(one: TimeReport) -> Iterator[str]:
    counted = precise_duration(one.total_seconds - one.seconds["paused"])
    yield f"effective training time (ETTR): {percent(one.ettr)} of {counted}"
    yield f"goodput: {percent(one.goodput)} of {precise_duration(one.held_seconds)} with allocated nodes"
    yield f"steps: {one.steps}, lost: {one.steps_lost}"


def _print_parts(one: TimeReport, console: Console) -> None:
    newest = one.attempts[-SHOWN_ATTEMPTS:] if len(one.attempts) > 1 else []
    columns = (
        Column(title="PART"),
        Column(title="", leaves=0),
        Column(title="SHARE", right=True),
        Column(title="TOTAL", right=True),
        *(Column(title=f"#{attempt.attempt}", right=True, leaves=2 + place) for place, attempt in enumerate(newest)),
        Column(title="MEANING", wraps=24, leaves=1),
    )
    counted = one.total_seconds - one.seconds["paused"]
    rows: list[list[str | Styled]] = []
    for part, meaning in PARTS.items():
        seconds = one.seconds[part]
        if seconds <= 0:
            continue
        share = seconds / counted if part != "paused" and counted > 0 else None
        own = [precise_duration(attempt.seconds[part]) if attempt.seconds[part] else "-" for attempt in newest]
        bar = "#" * round(BAR_WIDTH * (share or 0.0))
        rows.append([part.replace("_", " "), bar, percent(share), precise_duration(seconds), *own, meaning])
    totals = [precise_duration(sum(attempt.seconds.values())) for attempt in newest]
    rows.append([Styled(cell, "bold") for cell in ("all", "", "", precise_duration(one.total_seconds), *totals, "")])
    if newest:
        rows.append(["ended", "", "", "", *map(_reason, newest), ""])
    print_table(columns, rows, console=console)


def _reason(attempt: AttemptReport) -> str:
    return "running" if attempt.reason is None else attempt.reason.replace("_", " ")


def _print_tasks(tasks: Sequence[TimeReport], console: Console) -> None:
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
        numbers = (len(task.attempts), percent(task.ettr), percent(task.goodput), task.steps, task.steps_lost)
        times = (precise_duration(task.seconds["queue"]), precise_duration(task.total_seconds))
        rows.append([str(cell) for cell in (task.run_id, task.state, *numbers, *times)])
    print_table(columns, rows, console=console)


def _print_without(one: TimeReport, console: Console) -> None:
    columns = (
        Column(title="WITHOUT"),
        Column(title="GOODPUT", right=True),
        Column(title="ETTR", right=True, leaves=1),
        Column(title="COUNTED", wraps=30, leaves=3),
        Column(title="NOT COUNTED", wraps=30, leaves=2),
    )
    print_table(columns, [list(row) for row in without_rows(one)], console=console)


def without_rows(one: TimeReport) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of the table "without": measure, goodput and ETTR without it, what these figures include, what they omit."""
    for row in one.without:
        known = row.training_lost_seconds is not None
        ratios = [percent(share) if known else "not known" for share in (row.goodput, row.ettr)]
        yield row.measure, ratios[0], ratios[1], row.counted, row.not_counted


def interval_lines(interval: Interval) -> Iterator[str]:
    """The recommended checkpoint interval and the numbers it is based on, as lines of text."""
    yield ""
    cost = precise_duration(interval.save_cost_seconds)
    numbers = f"{interval.saves} save{'' if interval.saves == 1 else 's'}, with {cost} of stall per save"
    if interval.suggested_seconds is None or interval.seconds_between_interruptions is None:
        yield (
            "checkpoint interval: no recommendation, because this run was never interrupted, or its saves took no time "
            f"({numbers})"
        )
        return
    every = precise_duration(interval.suggested_seconds)
    share = percent(interval.cost(interval.suggested_seconds))
    steps = _steps(interval.suggested_steps or 1)
    yield f"checkpoint interval: every {steps} ({every}) costs least, {share} of the time"
    often = "interruption" if interval.interruptions == 1 else "interruptions"
    yield (
        f"  based on {numbers}; {interval.interruptions} {often}, one per "
        f"{precise_duration(interval.seconds_between_interruptions)} of time with allocated nodes; "
        f"{interval.step_seconds:.3g} s per step"
    )
    if interval.far_off:
        yield f"  {_present(interval)}"


def _steps(count: int) -> str:
    return "step" if count <= 1 else f"{count} steps"


def _present(interval: Interval) -> str:
    if interval.present_seconds is None:
        return "this run saves only when it stops or ends: set checkpoint.every_steps"
    steps = _steps(round(interval.present_seconds / interval.step_seconds))
    share = percent(min(1.0, interval.cost(interval.present_seconds)))
    often = "far too often" if interval.present_seconds < (interval.suggested_seconds or 0) else "far too rarely"
    return (
        f"this run saves {often}, every {steps}, which costs {share} of the time: set checkpoint.every_steps "
        f"to {interval.suggested_steps}"
    )
