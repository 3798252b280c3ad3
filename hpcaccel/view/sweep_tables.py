"""Sweeps on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from hpcaccel.sweeps.overview import Found, SweepOverview
from hpcaccel.view.tables import console_for, facts_table, state_text
from hpcaccel.view.words import clean, duration, number

__all__ = ["print_sweep", "print_trials", "sweep_in_a_line"]

TRIALS = ("complete", "pruned", "running", "waiting", "failed")
DETAIL_LENGTH = 300


def print_sweep(sweep: SweepOverview, *, stream: TextIO | None = None) -> None:
    """Everything about one sweep."""
    console = console_for(stream)
    console.print(facts_table(_facts(sweep)))
    if sweep.front:
        console.print()
        console.print(_front(sweep))


def print_trials(rows: Sequence[Mapping[str, Any]], *, stream: TextIO | None = None) -> None:
    """One line a trial, in the order given; all rows have the same columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in rows[0] if rows else ():
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(state_text(value) if title == "state" else Text(_shown(value)) for title, value in row.items()))
    console_for(stream).print(table)


def sweep_in_a_line(sweep: SweepOverview) -> str:
    """For a log of how it goes."""
    words = [_trials(sweep), _workers(sweep)]
    if sweep.best is not None:
        words.append(f"best {_values(sweep.best)} (trial {sweep.best.trial})")
    return "; ".join(words)


def _facts(sweep: SweepOverview) -> list[tuple[str, str | Text]]:
    state = state_text(sweep.state)
    if sweep.detail:
        state.append(f"  {clean(sweep.detail)[:DETAIL_LENGTH]}", style="default")
    rows: list[tuple[str, str | Text]] = [
        ("sweep", sweep.run_id),
        ("name", clean(sweep.name)),
        ("state", state),
        ("search", f"{sweep.method}, pruner {sweep.pruner}, {_goal(sweep)}"),
        ("trials", _trials(sweep)),
    ]
    if sweep.best is not None:
        rows.append(
            ("best", Text(f"{_values(sweep.best)}  trial {sweep.best.trial}{_seeds(sweep.best)}", style="bold"))
        )
        rows.append(("", _params(sweep.best)))
    rows.append(("workers", _workers(sweep).partition(": ")[2]))
    rows.append(("GPU-hours", _spent(sweep)))
    if sweep.seconds_left is not None:
        rows.append(("time left", f"about {duration(sweep.seconds_left)}"))
    rows += [
        ("failed", Text(f"{failure.count} × {clean(failure.error_class)}, the last is trial {failure.trial}: "
                        f"{clean(failure.detail)[:DETAIL_LENGTH]}", style="red"))
        for failure in sweep.failures
    ]  # fmt: skip
    rows.append(("jobs", f"{', '.join(sweep.job_ids) or '-'} ({clean(sweep.cluster or sweep.backend)})"))
    rows.append(("directory", clean(sweep.path)))
    return rows


def _goal(sweep: SweepOverview) -> str:
    pairs = zip(sweep.modes, sweep.metrics, strict=True)
    return ", ".join(f"{mode} {clean(name)}" for mode, name in pairs)


def _trials(sweep: SweepOverview) -> str:
    begun = sum(sweep.trials.values()) - sweep.again
    words = {"running": "interrupted"} if sweep.ended else {}
    counted = [f"{sweep.trials[state]} {words.get(state, state)}" for state in TRIALS if sweep.trials.get(state)]
    most = "" if sweep.max_trials is None else f" of {sweep.max_trials}"
    again = f", and {sweep.again} once more" if sweep.again else ""
    return f"{begun}{most}{again}{': ' if counted else ''}{', '.join(counted)}"


def _workers(sweep: SweepOverview) -> str:
    counted = ", ".join(f"{count} {state}" for state, count in sweep.workers.items())
    count = sum(sweep.workers.values())
    return f"{count} worker{'s' if count != 1 else ''}: {counted}"


def _spent(sweep: SweepOverview) -> str:
    spent = f"{sweep.gpu_hours:.1f}" if sweep.gpu_hours >= 10 else f"{sweep.gpu_hours:.2g}"
    return spent if sweep.max_gpu_hours is None else f"{spent} of {sweep.max_gpu_hours:g}"


def _values(found: Found) -> str:
    return ", ".join(f"{clean(name)} {number(value)}" for name, value in found.values.items())


def _seeds(found: Found) -> str:
    return f" (mean of {found.seeds} seeds)" if found.seeds > 1 else ""


def _params(found: Found) -> str:
    return clean("  ".join(f"{path}={_shown(value)}" for path, value in found.params.items()))


def _front(sweep: SweepOverview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("BEST TRIALS", justify="right")
    for name in sweep.metrics:
        table.add_column(clean(name), justify="right")
    table.add_column("WITH")
    for found in sweep.front:
        table.add_row(str(found.trial), *(number(value) for value in found.values.values()), _params(found))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else clean(str(value))
