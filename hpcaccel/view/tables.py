"""Runs as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcaccel.view.news import describe_end
from hpcaccel.view.overview import Overview
from hpcaccel.view.words import clean, clock_time, duration, number, step_of

__all__ = ["console_for", "facts_table", "print_runs", "print_status", "state_text"]

_STYLE = {
    "running": "green",
    "starting": "green",
    "completed": "bold green",
    "complete": "bold green",
    "pruned": "green",
    "failed": "bold red",
    "lost": "bold red",
    "cancelled": "yellow",
    "paused": "cyan",
    "pending": "blue",
}

PIPE_WIDTH = 200
"""Columns where the output is no terminal: nothing is cut off for a program that reads it."""


def print_runs(runs: Sequence[Overview], *, stream: TextIO | None = None) -> None:
    """One line a run, in the order given."""
    console_for(stream).print(_runs(runs, called="NAME"))


def _runs(runs: Sequence[Overview], *, called: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("RUN", called, "JOB", "STATE", "ATTEMPTS", "STEP", "LOSS", "CREATED"):
        right = title in ("ATTEMPTS", "STEP", "LOSS")
        table.add_column(title, justify="right" if right else "left", no_wrap=title in ("RUN", "STATE", "CREATED"))
    for run in runs:
        table.add_row(
            Text(run.run_id),
            Text(clean(run.name) if called == "NAME" else _changed(run)),
            Text(run.job_id),
            _state(run).append(f" ({clean(run.error_class)})" if run.error_class else ""),
            Text(str(run.attempts)),
            Text(step_of(run.step, run.total_steps)),
            Text("-" if run.last_loss is None else number(run.last_loss)),
            Text(clock_time(run.created) if run.created else "-"),
        )
    return table


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A line each: what it is, in bold, and its value."""
    table = Table.grid(padding=(0, 2))
    for label, value in facts:
        table.add_row(Text(label, style="bold"), value if isinstance(value, Text) else Text(value))
    return table


def print_status(run: Overview, *, stream: TextIO | None = None) -> None:
    """Everything about one run, with its attempts."""
    console = console_for(stream)
    console.print(facts_table(_facts(run)))
    if run.history:
        console.print()
        console.print(_attempts(run))
    if run.tasks:
        console.print()
        console.print(_runs(run.tasks, called="WITH"))


def _changed(run: Overview) -> str:
    return clean(" ".join(f"{key}={value}" for key, value in run.overrides.items()))


def _facts(run: Overview) -> list[tuple[str, str | Text]]:
    state = _state(run)
    if run.error_class:
        state.append(f" ({clean(run.error_class)})")
    if run.detail:
        state.append(f"  {clean(run.detail)}", style="default")
    rows: list[tuple[str, str | Text]] = [
        ("run", run.run_id),
        ("name", clean(run.name)),
        ("state", state),
        *([("advice", clean(run.advice))] if run.advice else []),
        ("job", f"{run.job_id or '-'} ({clean(run.cluster or run.backend)})"),
        ("step", step_of(run.step, run.total_steps)),
        ("steps lost", str(run.steps_lost)),
    ]
    if run.ettr and run.goodput:
        spent = f"{100 * run.ettr:.1f} % of all, {100 * run.goodput:.1f} % of that with nodes (see hpcaccel report)"
        rows.append(("time trained", spent))
    if run.slow_ranks:
        slow = [f"rank {one['rank']} on {clean(one['node'])} ({one['ratio']:g} x the others)" for one in run.slow_ranks]
        rows.append(("slow ranks", Text(", ".join(slow), style="yellow")))
    rows += [(clean(name), number(value)) for name, value in run.values.items()]
    if run.metrics_warning:
        rows.append(("metrics", Text(clean(run.metrics_warning), style="yellow")))
    rows.append(("checkpoint", run.checkpoint or "-"))
    rows.append(("directory", clean(run.path)))
    return rows


def _attempts(run: Overview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ATTEMPT", "STARTED", "TOOK", "FROM STEP", "HOW IT ENDED"):
        table.add_column(title, justify="right" if title in ("ATTEMPT", "FROM STEP", "TOOK") else "left")
    for attempt in run.history:
        table.add_row(
            Text(str(attempt.number)),
            Text(clock_time(attempt.start.time) if attempt.start is not None else "-"),
            Text(duration(attempt.end.seconds) if attempt.end is not None else "-"),
            Text("-" if attempt.resumed_step is None else str(attempt.resumed_step)),
            Text(describe_end(attempt.end) if attempt.end is not None else "-"),
        )
    return table


def _state(run: Overview) -> Text:
    return state_text(run.state)


def state_text(state: str) -> Text:
    """A state of a run or a trial in its colour."""
    return Text(state, style=_STYLE.get(state, ""))


def console_for(stream: TextIO | None) -> Console:
    stream = sys.stdout if stream is None else stream
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
