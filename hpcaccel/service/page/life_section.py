"""The bar of a run's life, and the list of its attempts."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from dash import html

from hpcaccel.core.formatting import clock_time, counted, duration
from hpcaccel.service.page import elements
from hpcaccel.service.page.place import Place
from hpcaccel.service.page.plain_tables import plain_table
from hpcaccel.view.life_bar import LifePart
from hpcaccel.view.run_overview import Overview

__all__ = ["attempts_list", "life_section"]

PARTS = ("queued", "starting", "training", "saving", "lost", "hung", "paused")
WAITS = ("queued", "paused")
LEAST_PERCENT = 0.4
"""Parts are at least this wide, so that a short hang is visible in a long life."""
LONGEST_WAIT = 0.5
"""A pause or a wait in the queue is cut to this share of the time with nodes; its text states its length."""


def life_section(run: Overview) -> html.Section | None:
    """The bar, its legend with the time of each kind of part, and its two ends."""
    if not run.life:
        return None
    whole = sum(part.ended - part.started for part in run.life) or 1.0
    spent: dict[str, float] = defaultdict(float)
    for part in run.life:
        spent[part.part] += part.ended - part.started
    longest = _longest_wait(spent)
    shown = sum(_shown(part, longest) for part in run.life) or 1.0
    bars = []
    for part in run.life:
        seconds, width = part.ended - part.started, _shown(part, longest)
        cut = width < seconds
        said = f"{part.part}, {duration(seconds)}, from {clock_time(part.started)} (attempt {part.attempt})"
        bars.append(
            html.Span(
                duration(seconds) if cut else None,
                className=f"life-part p-{part.part}" + (" is-cut" if cut else ""),
                style={"flexGrow": f"{max(100 * width / shown, LEAST_PERCENT):.2f}"},
                title=f"{said}\n{part.text}" if part.text else said,
            )
        )
    legend = [
        html.Li(
            [html.Span(className=f"swatch p-{name}"), name, html.Span(duration(spent[name]), className="number muted")]
        )
        for name in PARTS
        if name in spent
    ]
    return html.Section(
        className="card life",
        children=[
            html.Header([html.H2("Life"), html.Span(_summary(run, whole), className="muted")]),
            html.Div(bars, className="life-bar", role="img", **elements.labelled(_words(spent))),
            html.Div(
                [html.Span(clock_time(run.life[0].started)), html.Span(clock_time(run.life[-1].ended))],
                className="life-ends number",
            ),
            html.Ul(legend, className="legend"),
        ],
    )


def _shown(part: LifePart, longest: float) -> float:
    seconds = part.ended - part.started
    return min(seconds, longest) if part.part in WAITS else seconds


def _longest_wait(spent: dict[str, float]) -> float:
    with_nodes = sum(seconds for name, seconds in spent.items() if name not in WAITS)
    return LONGEST_WAIT * with_nodes if with_nodes else math.inf


def _summary(run: Overview, whole: float) -> str:
    parts = [f"{duration(whole)} in {counted(max(1, run.attempts), 'attempt')}"]
    if run.goodput is not None:
        parts.append(f"{100 * run.goodput:.0f} % of the time with nodes in training")
    if run.steps_lost:
        parts.append(f"{counted(run.steps_lost, 'step')} lost")
    return ", ".join(parts)


def _words(spent: dict[str, float]) -> str:
    return ", ".join(f"{name} {duration(spent[name])}" for name in PARTS if name in spent)


def attempts_list(run: Overview, place: Place) -> html.Section | None:
    """How each attempt ended; of an array, its tasks."""
    if run.tasks:
        return _tasks(run)
    if not run.history:
        return None
    rows = []
    for attempt in reversed(run.history):
        start, end = attempt.start, attempt.end
        how = "running" if end is None and run.ended is None else "no end recorded" if end is None else str(end.reason)
        what = "" if end is None else end.detail or end.advice
        rows.append(
            html.Tr(
                [
                    html.Td(str(attempt.number), className="number"),
                    html.Td(elements.badge(how)),
                    html.Td("" if start is None else clock_time(start.time), className="number muted"),
                    html.Td("" if end is None or end.seconds is None else duration(end.seconds), className="number"),
                    html.Td(_steps(attempt), className="number"),
                    html.Td("" if start is None else ", ".join(start.nodes), className="muted"),
                    html.Td(what, className="wide"),
                ]
            )
        )
    heads = ("#", "Ended", "Began", "Time", "Steps", "Nodes", "")
    return _table("Attempts", heads, rows)


def _steps(attempt: Any) -> str:
    last = attempt.steps.last_step
    first = attempt.resumed_step
    return "" if last is None else f"{(first or 0) + 1} to {last}" if last > (first or 0) else "none"


def _tasks(run: Overview) -> html.Section:
    rows = [
        html.Tr(
            [
                html.Td(str(index), className="number"),
                html.Td(elements.badge(task.state)),
                html.Td("" if task.step is None else str(task.step), className="number"),
                html.Td("" if task.last_loss is None else f"{task.last_loss:.4g}", className="number"),
                html.Td(", ".join(f"{key}={value}" for key, value in task.overrides.items()), className="wide"),
            ]
        )
        for index, task in enumerate(run.tasks)
    ]
    return _table("Tasks", ("#", "State", "Step", "Loss", "Settings"), rows)


def _table(title: str, heads: tuple[str, ...], rows: list[Any]) -> html.Section:
    return html.Section([html.Header(html.H2(title)), plain_table(heads, rows)], className="card")
