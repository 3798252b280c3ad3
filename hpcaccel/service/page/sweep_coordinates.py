"""The parallel coordinates of a sweep: a line for each trial, from its parameters to its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpcaccel.service.page.sweep_pictures import PRUNED, TEXT, layout_of
from hpcaccel.sweeps.results import OWN_COLUMNS
from hpcaccel.view.sweep_data import BEST
from hpcaccel.view.sweep_parallel import Coordinate, choice_axis, numeric_axis

__all__ = ["parallel", "parameters_of"]

MOST_LINES = 300
"""Lines drawn at most: the best trials, and an even selection of the others."""
SHADES = ("#c9daf0", "#9dbde4", "#6f9dd4", "#4681c2", "#2a6fbb", "#1f5aa0")
"""From the worst to the best of the complete trials."""


def parameters_of(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[str]:
    """The columns of a table of trials that are parameters of the search."""
    own = OWN_COLUMNS | set(metrics) | {f"metric.{name}" for name in metrics}
    return [name for name in (rows[0] if rows else {}) if name not in own]


def parallel(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], direction: str, best: int | None
) -> dict[str, Any]:
    """The parallel coordinates of a sweep's trials, as a figure.

    Args:
        rows: the table of trials.
        direction: ``min`` or ``max``, of the first metric.
        best: number of the best trial.
    """
    value = _column(metrics[0])
    chosen = _chosen([row for row in rows if _is_number(row.get(value))], value, direction)
    possible = [*(_parameter(name, chosen) for name in parameters_of(rows, metrics)), *_metrics(metrics, chosen)]
    axes = [axis for axis in possible if axis is not None]
    complete = [row["trial"] for row in chosen if row["state"] == "complete"]  # the best first
    shade = {trial: SHADES[-1 - rank * len(SHADES) // len(complete)] for rank, trial in enumerate(complete)}
    data = []
    for colour in (PRUNED, *SHADES):
        some = [row for row in reversed(chosen) if row["trial"] != best and shade.get(row["trial"], PRUNED) == colour]
        if some:
            data.append(_lines(axes, some, colour, 0.9 if colour != PRUNED else 0.7))
    data += [_lines(axes, [row], BEST, 2.6) for row in chosen if row["trial"] == best]
    return {"data": data, "layout": _layout(axes)}


def _column(metric: str) -> str:
    return f"metric.{metric}" if metric in OWN_COLUMNS else metric


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _chosen(rows: list[Mapping[str, Any]], value: str, direction: str) -> list[Mapping[str, Any]]:
    sign = 1 if direction == "min" else -1
    ranked = sorted(rows, key=lambda row: (row["state"] != "complete", sign * row[value]))
    if len(ranked) <= MOST_LINES:
        return ranked
    first, others = ranked[: MOST_LINES // 2], ranked[MOST_LINES // 2 :]
    room = MOST_LINES - len(first)
    return [*first, *(others[place * len(others) // room] for place in range(room))]


def _parameter(name: str, rows: Sequence[Mapping[str, Any]]) -> Coordinate | None:
    values = {row["trial"]: row[name] for row in rows if row.get(name) is not None}
    if not values:
        return None
    if not all(_is_number(value) for value in values.values()):
        return choice_axis(name, values)
    low, high = min(values.values()), max(values.values())
    return numeric_axis(name, values, log=low > 0 and high >= 20 * low)


def _metrics(metrics: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Coordinate | None]:
    found: list[Coordinate | None] = []
    for name in metrics:
        values = {row["trial"]: row[_column(name)] for row in rows if _is_number(row.get(_column(name)))}
        if values:
            low, high = min(values.values()), max(values.values())
            found.append(numeric_axis(name, values, log=low > 0 and high > 20 * low))
    return found


def _lines(axes: Sequence[Coordinate], rows: Sequence[Mapping[str, Any]], colour: str, width: float) -> dict[str, Any]:
    """All ``rows`` as one line with gaps."""
    x: list[int | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    for row in rows:
        crossed = [(place, axis.places[row["trial"]]) for place, axis in enumerate(axes) if row["trial"] in axis.places]
        x += [*(place for place, _ in crossed), None]
        y += [*(height for _, height in crossed), None]
        texts += [f"trial {row['trial']}, {row['state']}"] * (len(crossed) + 1)
    return {
        "type": "scatter", "mode": "lines", "x": x, "y": y, "text": texts, "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": colour, "width": width}, "opacity": 0.85,
    }  # fmt: skip


def _layout(axes: Sequence[Coordinate]) -> dict[str, Any]:
    shapes = [
        {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "line": {"color": TEXT, "width": 1}}
        for place in range(len(axes))
    ]
    notes = [
        {"x": place, "y": y, "text": f" {text}", "xanchor": "left", "showarrow": False, "font": {"size": 10}}
        for place, axis in enumerate(axes)
        for y, text in axis.ticks
    ]
    titles = [axis.title.removeprefix("args.") for axis in axes]
    return layout_of(
        height=340, shapes=shapes, annotations=notes, hovermode="closest", margin={"l": 24, "r": 56, "t": 8, "b": 30},
        xaxis={
            "tickvals": list(range(len(axes))), "ticktext": titles, "showgrid": False, "showline": False,
            "range": [-0.05, max(0.5, len(axes) - 1 + 0.05)],
        },
        yaxis={"visible": False, "range": [-0.05, 1.05]},
    )  # fmt: skip
