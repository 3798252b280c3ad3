"""Sweeps on a terminal: the facts of ``sweep status``, the table of trials, and a line for a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console

from hpcaccel.core.formatting import clean, duration, gpu_hours, number
from hpcaccel.sweeps.results import OWN_COLUMNS
from hpcaccel.sweeps.sweep_overview import Found, SweepOverview
from hpcaccel.view.run_tables import state_text
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_facts, print_table

__all__ = ["print_sweep", "print_trials", "sweep_in_a_line"]

TRIALS = ("complete", "pruned", "running", "waiting", "failed")
DETAIL_LENGTH = 300


def print_sweep(sweep: SweepOverview, *, stream: TextIO | None = None) -> None:
    """Print all facts about one sweep."""
    console = console_for(stream)
    print_facts(_facts(sweep), console=console)
    if sweep.front:
        console.print()
        _print_front(sweep, console)


_LEAVE_FIRST = ("attempts", "worker", "gpu_seconds", "seconds", "step")
"""Columns left out of a table of trials on a narrow terminal, in this order. After them the parameters are left out,
starting with the last one."""


def print_trials(
    rows: Sequence[Mapping[str, Any]], *, params: Sequence[str], stream: TextIO | None = None
) -> list[str]:
    """Print a line for each trial, in the given order.

    Args:
        rows: values by column title, one mapping for each trial, all with the same columns.
        params: titles of the columns that are parameters of the search.

    Returns:
        Titles of the columns that were left out because the terminal is too narrow.
    """
    titles = list(rows[0]) if rows else []
    short = _short_names(params)
    columns = [
        Column(
            title=title,
            right=title != "state",
            shortens=len(_LEAVE_FIRST) if title in short else None,
            short_title=short.get(title, ""),
            leaves=_place(title, params),
        )
        for title in titles
    ]
    cells = ([state_text(row[title]) if title == "state" else _shown(row[title]) for title in titles] for row in rows)
    return print_table(columns, cells, console=console_for(stream))


def _place(title: str, params: Sequence[str]) -> int | None:
    if title in params:
        return len(_LEAVE_FIRST) + len(params) - params.index(title)
    return _LEAVE_FIRST.index(title) if title in _LEAVE_FIRST else None


def _short_names(params: Sequence[str]) -> dict[str, str]:
    """``lr`` for ``args.lr``, unless another parameter or column has that name."""
    words = [path.rpartition(".")[2] for path in params]
    return {
        path: word
        for path, word in zip(params, words, strict=True)
        if words.count(word) == 1 and word not in OWN_COLUMNS
    }


def sweep_in_a_line(sweep: SweepOverview) -> str:
    """Progress of a sweep in one line, for a log."""
    parts = [_trials(sweep), _workers(sweep)]
    if sweep.best is not None:
        parts.append(f"best {_values(sweep.best)} (trial {sweep.best.trial})")
    return "; ".join(parts)


def _facts(sweep: SweepOverview) -> list[tuple[str, Cell | Sequence[Cell]]]:
    state: list[Cell] = [state_text(sweep.state)]
    if sweep.detail:
        state.append(f"  {clean(sweep.detail)[:DETAIL_LENGTH]}")
    rows: list[tuple[str, Cell | Sequence[Cell]]] = [
        ("sweep", sweep.run_id),
        ("name", clean(sweep.name)),
        ("state", state),
        ("search", f"{sweep.method}, pruner {sweep.pruner}, {_goal(sweep)}"),
        ("trials", _trials(sweep)),
    ]
    if sweep.best is not None:
        best = f"{_values(sweep.best)}  trial {sweep.best.trial}{_seeds(sweep.best)}"
        rows.append(("best", Styled(best, "bold")))
        rows.append(("", _params(sweep.best)))
    rows.append(("workers", _workers(sweep).partition(": ")[2]))
    rows.append(("GPU-hours", _spent(sweep)))
    if sweep.seconds_left is not None:
        rows.append(("time left", f"about {duration(sweep.seconds_left)}"))
    rows += [
        ("failed", Styled(f"{failure.count} × {clean(failure.error_class)}, most recently trial {failure.trial}: "
                          f"{clean(failure.detail)[:DETAIL_LENGTH]}", "red"))
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
    again = f", and {sweep.again} continued" if sweep.again else ""
    return f"{begun}{most}{again}{': ' if counted else ''}{', '.join(counted)}"


def _workers(sweep: SweepOverview) -> str:
    counted = ", ".join(f"{count} {state}" for state, count in sweep.workers.items())
    count = sum(sweep.workers.values())
    return f"{count} worker{'s' if count != 1 else ''}: {counted}"


def _spent(sweep: SweepOverview) -> str:
    spent = gpu_hours(sweep.gpu_hours)
    return spent if sweep.max_gpu_hours is None else f"{spent} of {sweep.max_gpu_hours:g}"


def _values(found: Found) -> str:
    return ", ".join(f"{clean(name)} {number(value)}" for name, value in found.values.items())


def _seeds(found: Found) -> str:
    return f" (mean of {found.seeds} seeds)" if found.seeds > 1 else ""


def _params(found: Found) -> str:
    return clean("  ".join(f"{path}={_shown(value)}" for path, value in found.params.items()))


def _print_front(sweep: SweepOverview, console: Console) -> None:
    columns = (
        Column(title="BEST TRIALS", right=True),
        *(Column(title=clean(name), right=True) for name in sweep.metrics),
        Column(title="PARAMETERS", wraps=20),
    )
    rows = [(str(found.trial), *map(number, found.values.values()), _params(found)) for found in sweep.front]
    print_table(columns, rows, console=console)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else clean(str(value))
