"""The page of all sweeps."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
from dash import Dash, Input, Output, State, html, no_update

from hpcaccel.core.formatting import gpu_hours, number
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client
from hpcaccel.service.page import elements
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place, place_of
from hpcaccel.view.run_overview import Overview

__all__ = ["layout", "register"]

SWEEPS = 100
"""Number of sweeps shown, the newest first."""
COLUMNS = (
    {"field": "state", "headerName": "State", "width": 128, "cellRenderer": "RunState"},
    {"field": "name", "headerName": "Name", "flex": 2, "minWidth": 180, "cellRenderer": "SweepName"},
    {"field": "progress", "headerName": "Trials", "width": 190, "cellRenderer": "SweepTrials"},
    {"field": "best", "headerName": "Best", "width": 190},
    {"field": "spent", "headerName": "GPU-hours", "width": 130, "type": "rightAligned"},
    {"field": "failed", "headerName": "Failed", "width": 92, "type": "rightAligned"},
    {"field": "detail", "headerName": "What is going on", "flex": 2, "minWidth": 160},
    {"field": "created", "headerName": "Created", "width": 124, "cellRenderer": "RunTime"},
)


def layout(place: Place) -> html.Div:
    """The page, without rows."""
    return html.Div(
        className="page is-full",
        children=[
            html.Header(
                className="bar", children=[html.H1(["Sweeps", html.Span(id="sweeps-total", className="count")])]
            ),
            html.Div(id="sweeps-blank"),
            html.Div(
                id="sweeps-place",
                className="grid-place",
                children=dag.AgGrid(
                    id="sweeps-grid",
                    columnDefs=list(COLUMNS),
                    rowData=None,
                    getRowId="params.data.run_id",
                    defaultColDef={"sortable": True, "resizable": True},
                    dashGridOptions={"rowHeight": 46, "headerHeight": 34},
                    eventListeners={"rowDoubleClicked": ["hpcaccelOpenSweep(params)"]},
                    style={"height": "100%", "width": "100%"},
                ),
            ),
        ],
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the page."""

    @app.callback(
        Output("sweeps-grid", "rowData"),
        Output("sweeps-blank", "children"),
        Output("sweeps-place", "hidden"),
        Output("sweeps-total", "children"),
        Input("tick", "data"),
        State("sweeps-grid", "rowData"),
        State("url", "pathname"),
    )
    async def rows(_: Any, before: list[dict[str, Any]] | None, path: str) -> Any:
        try:
            shown, total = await calls(_rows)
        except HpcaccelError as error:
            return no_update, elements.failed(error), True, ""
        if shown == before and shown:
            return (no_update,) * 4
        return shown, None if shown else _blank(place_of(path)), not shown, str(total)


def _rows(client: Client) -> tuple[list[dict[str, Any]], int]:
    page = client.sweeps(limit=SWEEPS)
    return [_row(client, one) for one in page.runs], page.total


def _row(client: Client, listed: Overview) -> dict[str, Any]:
    try:
        sweep = client.sweep(listed.run_id, rows=False)
    except HpcaccelError as error:  # of a cluster that cannot be reached: what the list had last
        known = {key: getattr(listed, key) for key in ("run_id", "name", "state", "created")}
        return {**known, "detail": str(error), "trials": None}
    spent = gpu_hours(sweep.gpu_hours)
    best = sweep.best
    return {
        "run_id": listed.run_id,
        "name": sweep.name,
        "state": sweep.state,
        "detail": sweep.detail,
        "trials": {state: count for state, count in sweep.trials.items() if count},
        "total": sweep.max_trials,
        "best": None if best is None else ", ".join(f"{name} {number(value)}" for name, value in best.values.items()),
        "spent": spent if sweep.budget_gpu_hours is None else f"{spent} of {sweep.budget_gpu_hours:g}",
        "failed": sweep.trials.get("failed") or None,
        "created": sweep.created,
    }


def _blank(place: Place) -> html.Div:
    text = [
        "A sweep searches the best values of a program's arguments. Start one in a terminal: ",
        html.Code("hpcaccel sweep start sweep.yaml"),
        ", or submit a spec with a section ",
        html.Code("sweep:"),
        ".",
    ]
    return elements.nothing("No sweeps yet", text, place.href("submit"), "Start a sweep")
