"""The page of one sweep: its state, its figures, the best spec, and the table of trials."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html, no_update

from hpcaccel.core.formatting import number
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.page import elements, sweep_pictures
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place
from hpcaccel.service.page.sweep_coordinates import parallel, parameters_of
from hpcaccel.service.page.sweep_header import sweep_head
from hpcaccel.view.sweep_view import SweepView

__all__ = ["layout", "register"]

LONG_TABLE, SECONDS = 2000, 30
"""A table with more trials than ``LONG_TABLE`` is read again at most every ``SECONDS``."""
FIGURES = (
    ("best", "Best so far", "Best value of a complete trial against GPU-hours"),
    ("curves", "Learning curves", "Orange: the best. Blue: complete. Grey: pruned. Violet: running"),
    ("rungs", "Rungs", "Trials that reached a rung → trials that went on"),
    ("importances", "Importance of parameters", "Share of the differences between trials"),
)
TITLES = {"trial": "Trial", "state": "State", "step": "Step", "seconds": "Seconds", "gpu_seconds": "GPU-seconds",
          "worker": "Worker", "attempts": "Attempts"}  # fmt: skip


def layout(place: Place) -> html.Div:
    """The page, without data."""
    return html.Div(
        className="page sweep-page",
        children=[
            dcc.Store(id="sweep-id", data=place.ident),
            dcc.Store(id="sweep-seen", data=""),
            dcc.Store(id="sweep-version", data=None),
            html.Div(id="sweep-head", children=elements.loading()),
            _best_card(f"{place.href('submit')}?sweep={quote(place.ident)}"),
            html.Div(id="sweep-body", className="is-loading", children=_body()),
        ],
    )


def _body() -> list[Any]:
    return [
        html.Div([_figure(*one) for one in FIGURES], className="sweep-figures"),
        _figure("parallel", "Parallel coordinates", "A line for each trial; darker is better, orange is the best"),
        html.Section(
            className="sweep-card",
            children=[
                html.Header([html.H2("Trials"), html.Span(id="sweep-rows", className="muted")]),
                html.Div(_grid(), className="sweep-grid"),
            ],
        ),
    ]


def _figure(name: str, title: str, about: str) -> html.Section:
    return html.Section(
        id=f"sweep-card-{name}",
        className="sweep-card",
        children=[
            html.Header([html.H2(title), html.Span(about, className="muted")]),
            dcc.Graph(
                id=f"sweep-{name}",
                figure={"data": [], "layout": sweep_pictures.layout_of()},
                config={"displayModeBar": False, "responsive": True},
                className="sweep-graph",
            ),
            html.P(id=f"sweep-none-{name}", className="sweep-none", hidden=True),
        ],
    )


def _grid() -> dag.AgGrid:
    return dag.AgGrid(
        id="sweep-grid",
        columnDefs=[],
        rowData=[],
        getRowId="'t' + params.data.trial",
        defaultColDef={"sortable": True, "filter": True, "resizable": True, "minWidth": 84},
        dashGridOptions={"rowHeight": 32, "headerHeight": 34, "suppressFieldDotNotation": True},
        style={"height": "100%", "width": "100%"},
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the page."""
    _register_figures(app, calls)
    _register_table(app, calls)
    _register_best(app, calls)


def _register_figures(app: Dash, calls: ClientCalls) -> None:
    @app.callback(
        Output("sweep-head", "children"),
        Output("sweep-body", "className"),
        Output("sweep-best-of", "data"),
        Output("sweep-best-title", "children"),
        Output("sweep-best-params", "children"),
        Output("sweep-best-card", "hidden"),
        *[Output(f"sweep-{name}", "figure") for name, _, _ in FIGURES],
        *[Output(f"sweep-none-{name}", "children") for name, _, _ in FIGURES],
        *[Output(f"sweep-none-{name}", "hidden") for name, _, _ in FIGURES],
        *[Output(f"sweep-{name}", "style") for name, _, _ in FIGURES],
        Output("sweep-version", "data"),
        Output("sweep-seen", "data"),
        Input("tick", "data"),
        Input("sweep-id", "data"),
        State("sweep-seen", "data"),
        State("sweep-version", "data"),
    )
    async def show(_: Any, run_id: str, seen: str, version: dict[str, Any] | None) -> Any:
        same = (no_update,) * (8 + 4 * len(FIGURES))
        try:
            sweep = await calls(lambda client: client.sweep(run_id, rows=False))
        except HpcaccelError as error:
            return (elements.failed(error), "is-loading", *same[2:])
        digest = json.dumps([sweep.to_json()])
        if digest == seen:
            return same
        figures = (
            sweep_pictures.best_so_far(sweep), sweep_pictures.curves(sweep), sweep_pictures.rung_funnel(sweep),
            sweep_pictures.importances(sweep.importances),
        )  # fmt: skip
        missing = _missing(sweep)
        hidden = [not text for text in missing]
        shown = [{"display": "none"} if text else {} for text in missing]
        trial = None if sweep.best is None else sweep.best.number
        best = (trial, f"Best: trial {trial}", _params(sweep), trial is None)
        return sweep_head(sweep), "", *best, *figures, *missing, *hidden, *shown, _version(sweep, version), digest


def _register_table(app: Dash, calls: ClientCalls) -> None:
    @app.callback(
        Output("sweep-grid", "rowData"),
        Output("sweep-grid", "columnDefs"),
        Output("sweep-parallel", "figure"),
        Output("sweep-rows", "children"),
        Input("sweep-version", "data"),
        State("sweep-id", "data"),
        prevent_initial_call=True,
    )
    async def table(version: dict[str, Any] | None, run_id: str) -> Any:
        if version is None:
            return (no_update,) * 4
        try:
            rows = await calls(lambda client: client.trials(run_id))
        except HpcaccelError as error:
            return no_update, no_update, no_update, elements.reason_of(error)
        figure = parallel(rows, version["metrics"], version["direction"], version["best"])
        return rows, _columns(rows, version["metrics"]), figure, f"{len(rows):,}"


def _register_best(app: Dash, calls: ClientCalls) -> None:
    @app.callback(
        Output("sweep-best-yaml", "children"),
        Output("sweep-best-copy", "value"),
        Output("sweep-best-file", "disabled"),
        Input("sweep-best-of", "data"),
        State("sweep-id", "data"),
    )
    async def best(trial: int | None, run_id: str) -> Any:
        if trial is None:
            return no_update, no_update, True
        try:
            text = await calls(lambda client: client.best(run_id, trial=trial))
        except HpcaccelError as error:
            return elements.reason_of(error), "", True
        return text, text, False

    @app.callback(
        Output("sweep-download", "data"),
        Input("sweep-best-file", "n_clicks"),
        State("sweep-best-copy", "value"),
        prevent_initial_call=True,
    )
    def download(clicked: int | None, text: str) -> Any:
        return {"content": text, "filename": "job.yaml", "type": "application/yaml"} if clicked else no_update


def _version(sweep: SweepView, before: dict[str, Any] | None) -> Any:
    """The values on which the table depends; ``no_update`` if it need not be read again."""
    best = None if sweep.best is None else sweep.best.number
    state = [sweep.trials, best, sweep.state]
    total = sum(sweep.trials.values())
    if before is not None:
        is_new = before["state"] != state
        if not is_new or (total > LONG_TABLE and time.time() - before["at"] < SECONDS):
            return no_update
    return {
        "state": state, "at": time.time(), "metrics": sweep.metrics, "direction": sweep.direction, "best": best,
    }  # fmt: skip


def _missing(sweep: SweepView) -> list[str]:
    """For each figure why it is empty; an empty text if it is not."""
    return [
        "" if sweep.best_so_far else "No trial is complete yet.",
        "" if sweep.curves else f"No trial has logged {sweep.metric} yet.",
        "" if sweep.rungs else _no_rungs(sweep),
        "" if sweep.importances else "Shown when enough trials have a value.",
    ]


def _no_rungs(sweep: SweepView) -> str:
    if sweep.pruner == "none":
        return "This sweep has no pruner: each trial runs to its end."
    return "No trial has reached a rung yet."


def _best_card(submit: str) -> html.Section:
    return html.Section(
        id="sweep-best-card",
        hidden=True,
        className="sweep-card sweep-best",
        children=[
            dcc.Store(id="sweep-best-of", data=None),
            dcc.Download(id="sweep-download"),
            html.Header(
                [
                    html.H2(id="sweep-best-title"),
                    html.Div(
                        [
                            dmc.CopyButton(
                                "Copy job.yaml",
                                id="sweep-best-copy",
                                value="",
                                copiedChildren="Copied",
                                className="sweep-copy",
                                variant="default",
                                size="xs",
                            ),
                            html.Button("Download", id="sweep-best-file", className="button", disabled=True),
                            html.A("Open in Submit", href=submit, className="button is-main"),
                        ]
                    ),
                ]
            ),
            html.Dl(id="sweep-best-params", className="sweep-params"),
            html.Details([html.Summary("job.yaml"), html.Pre(id="sweep-best-yaml")]),
        ],
    )


def _params(sweep: SweepView) -> list[Any]:
    if sweep.best is None:
        return []
    shown = {
        name.removeprefix("args."): number(value) if isinstance(value, float) else str(value)
        for name, value in sweep.best.params.items()
    }
    return [html.Div([html.Dt(name), html.Dd(value)]) for name, value in shown.items()]


def _columns(rows: list[dict[str, Any]], metrics: list[str]) -> list[dict[str, Any]]:
    params = set(parameters_of(rows, metrics))
    columns: list[dict[str, Any]] = []
    for name in rows[0] if rows else []:
        column: dict[str, Any] = {
            "field": name,
            "headerName": TITLES.get(name, name.removeprefix("args.")),
            "width": 118,
        }
        if name == "trial":
            column |= {"pinned": "left", "width": 84}
        elif name == "state":
            column |= {"cellRenderer": "RunState", "width": 126}
        elif name in params or name in metrics or name in ("step", "seconds", "gpu_seconds"):
            column |= {"valueFormatter": {"function": "hpcaccelNumber(params)"}, "type": "rightAligned"}
            column |= {"width": 132} if name == "gpu_seconds" else {}
        columns.append(column)
    return columns
