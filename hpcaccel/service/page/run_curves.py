"""The live curves of a run: two metrics side by side, each one line across all attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import Dash, Input, Output, State, dcc, html, no_update

from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client
from hpcaccel.service.page import elements
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import place_of
from hpcaccel.view.metric_buckets import Bucket

__all__ = ["curves_layout", "figure", "register_curves"]

BUCKETS = 400
"""Points of a curve. SVG draws up to some thousands without effort."""
THROUGHPUT = ("tokens_per_second", "tokens_per_sec", "tok/s", "samples_per_second", "throughput", "steps_per_second")
PALETTE = ("var(--accent)", "var(--green)")


def curves_layout() -> html.Div:
    """Two graphs and the choice of their metrics."""
    return html.Div(className="curves", children=[_curve(0), _curve(1)])


def _curve(index: int) -> html.Section:
    return html.Section(
        id=f"curve-card-{index}",
        className="card",
        hidden=True,
        children=[
            dmc.Select(
                id=f"curve-name-{index}", data=[], size="xs", allowDeselect=False, searchable=True,
                className="curve-name", **elements.labelled("Metric"),
            ),
            dcc.Graph(
                id=f"curve-{index}", config={"displayModeBar": False, "responsive": True}, style={"height": "220px"},
                figure=figure([], index),
            ),
            dcc.Store(id=f"curve-seen-{index}", data=""),
        ],
    )  # fmt: skip


def register_curves(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of both graphs."""
    for index in (0, 1):
        _register(app, calls, index)


def _register(app: Dash, calls: ClientCalls, index: int) -> None:
    @app.callback(
        Output(f"curve-{index}", "figure"),
        Output(f"curve-name-{index}", "data"),
        Output(f"curve-name-{index}", "value"),
        Output(f"curve-card-{index}", "hidden"),
        Output(f"curve-seen-{index}", "data"),
        Input("tick", "data"),
        Input(f"curve-name-{index}", "value"),
        State(f"curve-seen-{index}", "data"),
        State("url", "pathname"),
    )
    async def draw(_: Any, name: str | None, seen: str, path: str) -> Any:
        place = place_of(path)
        if place.page != "run":
            return (no_update,) * 5
        try:
            names, chosen, curve = await calls(lambda client: _read(client, place.ident, name, index))
        except HpcaccelError as error:
            elements.reason_of(error)  # the head of the page shows it
            return (no_update,) * 5
        digest = sha256(json.dumps([names, chosen, [vars(one) for one in curve]]).encode()).hexdigest()
        if digest == seen:
            return (no_update,) * 5
        return figure(curve, index), names, chosen, not curve, digest


def _read(client: Client, run_id: str, name: str | None, index: int) -> tuple[list[str], str | None, Sequence[Bucket]]:
    names = client.metric_names(run_id)
    chosen = name if name in names else _default(names, index)
    return names, chosen, [] if chosen is None else client.metrics(run_id, [chosen], BUCKETS)[chosen]


def _default(names: Sequence[str], index: int) -> str | None:
    """The loss, or the first metric; beside it the throughput, or the next metric."""
    first = "loss" if "loss" in names else next(iter(names), None)
    if index == 0:
        return first
    return next((name for name in THROUGHPUT if name in names), None) or next((n for n in names if n != first), None)


def figure(curve: Sequence[Bucket], index: int) -> go.Figure:
    """The mean of each bucket as one line, minimum to maximum as a band, a thin line where an attempt begins."""
    made = go.Figure()
    color = ("#4f5bd5", "#1f9d63")[index]
    steps = [bucket.step_last for bucket in curve]
    if any(bucket.count > 1 for bucket in curve):
        shape = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        made.add_scatter(x=steps, y=[bucket.max for bucket in curve], **shape)
        made.add_scatter(x=steps, y=[bucket.min for bucket in curve], fill="tonexty", fillcolor=_soft(color), **shape)
    attempts = [bucket.attempt for bucket in curve]
    made.add_scatter(
        x=steps, y=[bucket.mean for bucket in curve], mode="lines" if len(curve) > 1 else "markers",
        line={"color": color, "width": 1.6}, customdata=attempts,
        hovertemplate="step %{x}<br>%{y:.5g}<br>attempt %{customdata}<extra></extra>",
    )  # fmt: skip
    for before, bucket in pairwise(curve):
        if bucket.attempt != before.attempt:
            made.add_vline(x=bucket.step_first - 0.5, line={"color": "#8b8f9b", "width": 1, "dash": "dot"})
    axis = {"gridcolor": "rgba(128,132,148,0.16)", "zeroline": False, "color": "#868a96", "showline": False}
    made.update_layout(
        template=None, showlegend=False, margin={"l": 48, "r": 12, "t": 8, "b": 38}, hovermode="x",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", uirevision="keep",
        font={"family": "var(--h-sans), sans-serif", "size": 11, "color": "#868a96"},
        xaxis={**axis, "showgrid": False, "nticks": 6, "title": {"text": "step", "standoff": 6, "font": {"size": 11}}},
        yaxis={**axis, "nticks": 5, "rangemode": ("normal", "tozero")[index]},
    )  # fmt: skip
    return made


def _soft(color: str) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"
