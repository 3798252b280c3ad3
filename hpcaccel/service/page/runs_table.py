"""The page of all runs: a table that the service filters, sorts and paginates, and actions on selected rows."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from hpcaccel.core.formatting import duration
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client_answers import RunPage
from hpcaccel.service.page import confirm, elements
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place, place_of
from hpcaccel.view.run_overview import Overview

__all__ = ["layout", "register"]

ROWS = 100
"""Rows of a page. The service sends only these, whatever the number of runs."""
GROUPS = {
    "all": [],
    "active": ["running", "starting", "stopping"],
    "waiting": ["pending", "requeued"],
    "paused": ["paused"],
    "failed": ["failed", "lost"],
    "done": ["completed", "pruned", "cancelled"],
}
"""The filter's choices, as states of a run."""
COLUMNS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("state", "State", 128, {"cellRenderer": "RunState"}),
    ("name", "Name", 260, {"cellRenderer": "RunName", "flex": 2, "minWidth": 180}),
    ("progress", "Progress", 168, {"cellRenderer": "RunProgress", "sort_by": "step"}),
    ("last_loss", "Loss", 104, {"type": "rightAligned"}),
    ("pace", "Steps/s", 96, {"type": "rightAligned"}),
    ("left", "Left", 96, {"type": "rightAligned"}),
    ("attempts", "Attempts", 96, {"type": "rightAligned"}),
    ("detail", "What is going on", 260, {"flex": 3, "minWidth": 160}),
    ("job_id", "Job", 100, {}),
    ("cluster", "Cluster", 104, {}),
    ("nodes", "Nodes", 128, {}),
    ("created", "Created", 124, {"cellRenderer": "RunTime"}),
)
"""Field, title, width, and further properties of ag-grid's column."""
SORTABLE = {"state", "name", "progress", "last_loss", "attempts", "job_id", "created"}
SHOWN = ["state", "name", "progress", "last_loss", "left", "attempts", "detail", "created"]
ACTIONS = ("stop", "requeue", "finish", "save", "cancel", "resume")


def layout(place: Place) -> html.Div:
    """The page, without rows."""
    return html.Div(
        className="page is-full",
        children=[
            html.Header(
                className="bar",
                children=[
                    html.H1(["Runs", html.Span(id="runs-total", className="count")]),
                    dmc.SegmentedControl(
                        id="runs-group",
                        value="all",
                        data=[{"value": name, "label": name.capitalize()} for name in GROUPS],
                        size="xs",
                        persistence=True,
                        persistence_type="session",
                    ),
                    dmc.TextInput(
                        id="runs-filter",
                        placeholder="Filter by name or id",
                        size="xs",
                        debounce=250,
                        rightSection=html.Kbd("/"),
                        className="filter",
                        **elements.labelled("Filter by name or id"),
                    ),
                    _columns_menu(),
                ],
            ),
            html.Div(id="runs-bulk", className="bulk", hidden=True, children=_bulk()),
            html.Div(id="runs-blank"),
            html.Div(id="runs-place", className="grid-place", children=_grid()),
            html.Footer(
                className="pager",
                children=[
                    html.Span(id="runs-range", className="muted"),
                    dmc.Pagination(id="runs-page", total=1, value=1, size="xs"),
                ],
            ),
            dcc.Store(id="runs-sort", data="-created"),
            dcc.Store(id="runs-seen", data=""),
        ],
    )


def _columns_menu() -> dmc.Popover:
    choices = [dmc.Checkbox(label=title, value=field, size="xs") for field, title, _, _ in COLUMNS]
    return dmc.Popover(
        position="bottom-end",
        shadow="md",
        children=[
            dmc.PopoverTarget(html.Button("Columns", className="button")),
            dmc.PopoverDropdown(
                dmc.CheckboxGroup(
                    id="runs-columns",
                    value=SHOWN,
                    children=dmc.Stack(choices, gap=6),
                    persistence=True,
                    persistence_type="local",
                )
            ),
        ],
    )


def _bulk() -> list[Any]:
    return [html.Span(id="runs-chosen"), *[confirm.button(name) for name in ACTIONS]]


def _grid() -> dag.AgGrid:
    columns = []
    for field, title, width, more in COLUMNS:
        extra = {key: value for key, value in more.items() if key != "sort_by"}
        columns.append(
            {
                "field": field,
                "headerName": title,
                "width": width,
                "sortable": field in SORTABLE,
                "comparator": {"function": "hpcaccelKeep"},
                "hide": field not in SHOWN,
                **extra,
            }
        )
    return dag.AgGrid(
        id="runs-grid",
        columnDefs=columns,
        defaultColDef={"resizable": True, "suppressMovable": False},
        getRowId="params.data.run_id",
        rowData=[],
        dashGridOptions={
            "rowSelection": {
                "mode": "multiRow",
                "checkboxes": True,
                "headerCheckbox": True,
                "enableClickSelection": False,
            },
            "selectionColumnDef": {"width": 40, "pinned": None},
            "rowHeight": 40,
            "headerHeight": 34,
            "suppressCellFocus": False,
            "animateRows": False,
            "suppressNoRowsOverlay": True,
            "alwaysMultiSort": False,
            "suppressMultiSort": True,
            "theme": {"function": "themeQuartz"},
        },
        eventListeners={"sortChanged": ["hpcaccelSorted(params)"], "rowDoubleClicked": ["hpcaccelOpenRow(params)"]},
        style={"height": "100%", "width": "100%"},
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the table."""

    @app.callback(
        Output("runs-grid", "rowData"),
        Output("runs-blank", "children"),
        Output("runs-place", "hidden"),
        Output("runs-total", "children"),
        Output("runs-range", "children"),
        Output("runs-page", "total"),
        Output("runs-seen", "data"),
        Input("tick", "data"),
        Input("runs-group", "value"),
        Input("runs-filter", "value"),
        Input("runs-sort", "data"),
        Input("runs-page", "value"),
        State("runs-seen", "data"),
        State("url", "pathname"),
    )
    async def rows(_: Any, group: str, text: str | None, sort: str, page: int, seen: str, path: str) -> Any:
        place = place_of(path)
        offset = ((page or 1) - 1) * ROWS
        wanted = GROUPS.get(group, [])
        try:
            found = await calls(
                lambda client: client.runs(state=wanted, name=text or "", sort=sort, limit=ROWS, offset=offset)
            )
        except HpcaccelError as error:
            return no_update, elements.failed(error), True, "", "", no_update, "error"
        shown = [_row(run) for run in found.runs]
        digest = sha256(json.dumps([shown, found.total, offset, wanted, text]).encode()).hexdigest()
        if digest == seen:
            return (no_update,) * 7
        blank = _blank(place, bool(wanted or text)) if not shown else None
        return shown, blank, not shown, str(found.total), _range(found, offset), max(1, -(-found.total // ROWS)), digest

    app.clientside_callback(
        ClientsideFunction("hpcaccel", "columns"),
        Output("runs-grid", "columnDefs"),
        Input("runs-columns", "value"),
        State("runs-grid", "columnDefs"),
    )
    app.clientside_callback(
        ClientsideFunction("hpcaccel", "chosen"),
        Output("chosen", "data"),
        Output("runs-bulk", "hidden"),
        Output("runs-chosen", "children"),
        Input("runs-grid", "selectedRows"),
    )
    app.clientside_callback(
        "function () { return 1; }",
        Output("runs-page", "value"),
        Input("runs-group", "value"),
        Input("runs-filter", "value"),
        Input("runs-sort", "data"),
        prevent_initial_call=True,
    )


def _row(run: Overview) -> dict[str, Any]:
    """The table's values of a run: only what a column shows."""
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "step": run.step,
        "total": run.total_steps,
        "last_loss": None if run.last_loss is None else f"{run.last_loss:.4g}",
        "pace": None if run.steps_per_second is None else f"{run.steps_per_second:.3g}",
        "left": None if run.eta_seconds is None else duration(run.eta_seconds),
        "attempts": run.attempts or None,
        "detail": run.detail or run.reason,
        "job_id": run.job_id,
        "cluster": run.cluster or run.backend,
        "nodes": ", ".join(run.nodes),
        "created": run.created,
    }


def _range(found: RunPage, offset: int) -> str:
    return f"{offset + 1} to {offset + len(found.runs)} of {found.total}" if found.runs else ""


def _blank(place: Place, filtered: bool) -> html.Div:
    if filtered:
        return elements.nothing("No run matches", "Choose All, or clear the filter.")
    text = ["Submit a job with the form, or in a terminal: ", html.Code("hpcaccel submit job.yaml"), "."]
    return elements.nothing("No runs yet", text, place.href("submit"), "Submit a job")
