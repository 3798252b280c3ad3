"""The page of one run: its life, curves, ranks, log and files, and the buttons that steer it."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from plotly.utils import PlotlyJSONEncoder

from hpcaccel.errors import HpcaccelError, RunNotFound
from hpcaccel.service.page import confirm, elements
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.life_section import attempts_list, life_section
from hpcaccel.service.page.place import Place, place_of
from hpcaccel.service.page.rank_strip import rank_strip
from hpcaccel.service.page.run_curves import curves_layout, register_curves
from hpcaccel.service.page.run_texts import register_texts, texts_layout
from hpcaccel.service.page.run_tiles import tiles, warnings
from hpcaccel.submission.runs.status import ACTIVE
from hpcaccel.view.run_overview import Overview

__all__ = ["layout", "register"]

PARTS = ("head", "warnings", "life", "tiles", "ranks", "attempts")
"""Parts of the page that are made of the overview, in their order."""


def layout(place: Place) -> html.Div:
    """The page, without data."""
    return html.Div(
        className="page",
        children=[
            dcc.Store(id="run-seen", data={}),
            html.Div(id="run-head", children=elements.loading()),
            html.Div(
                id="run-body",
                hidden=True,
                children=[
                    html.Div(id="run-warnings"),
                    html.Div(id="run-life"),
                    html.Div(id="run-tiles"),
                    curves_layout(),
                    html.Div(id="run-ranks"),
                    html.Div(id="run-attempts"),
                    texts_layout(),
                ],
            ),
        ],
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the page."""

    @app.callback(
        *[Output(f"run-{part}", "children") for part in PARTS],
        Output("run-body", "hidden"),
        Output("run-seen", "data"),
        Input("tick", "data"),
        State("run-seen", "data"),
        State("url", "pathname"),
    )
    async def show(_: Any, seen: dict[str, str], path: str) -> Any:
        place = place_of(path)
        unchanged = [no_update] * len(PARTS)
        if place.page != "run":
            return *unchanged, no_update, no_update
        try:
            run = await calls(lambda client: client.run(place.ident))
        except RunNotFound as error:
            return elements.failed(error, place.href("runs"), "All runs"), *unchanged[1:], True, {}
        except HpcaccelError as error:
            return elements.failed(error), *unchanged[1:], True, {}
        made = {
            "head": _head(run, place),
            "warnings": warnings(run),
            "life": life_section(run),
            "tiles": tiles(run),
            "ranks": rank_strip(run),
            "attempts": attempts_list(run, place),
        }
        digests = {part: _digest(content) for part, content in made.items()}
        changed = [made[part] if digests[part] != seen.get(part) else no_update for part in PARTS]
        return *changed, False, digests

    register_curves(app, calls)
    register_texts(app, calls)


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, cls=PlotlyJSONEncoder, sort_keys=True).encode()).hexdigest()[:16]


def _head(run: Overview, place: Place) -> html.Header:
    facts = [
        ("Run", run.run_id), ("Job", run.job_id), ("Cluster", run.cluster or run.backend),
        ("Partition", run.partition), ("Nodes", ", ".join(run.nodes)),
    ]  # fmt: skip
    return html.Header(
        className="run-head",
        children=[
            html.Div(html.A("Runs", href=place.href("runs"), className="muted"), className="crumbs"),
            html.Div(
                className="run-title",
                children=[
                    html.H1(run.name),
                    elements.badge(run.state),
                    html.Div(
                        [confirm.button(name, run.run_id, run.name) for name in _actions(run)], className="buttons"
                    ),
                ],
            ),
            html.P(run.detail or run.reason, className="run-detail") if _says_more(run) else None,
            html.Dl(
                [part for title, text in facts if text for part in (html.Div([html.Dt(title), html.Dd(text)]),)],
                className="facts",
            ),
        ],
    )


def _says_more(run: Overview) -> bool:
    return bool(run.detail or run.reason) and (run.detail or run.reason) != run.state


def _actions(run: Overview) -> tuple[str, ...]:
    """The actions that the run's state permits."""
    if run.state in ("pending", "requeued"):
        return ("cancel",)
    if run.state in ACTIVE:
        return ("save", "stop", "requeue", "finish", "profile", "cancel")
    return ("resume",) if run.state not in ("completed", "pruned") else ()
