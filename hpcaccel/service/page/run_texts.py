"""The texts and tables at the end of a run's page: log, spec, script, changes, checkpoints, usage."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html, no_update
from plotly.utils import PlotlyJSONEncoder

from hpcaccel.core.formatting import clock_time, duration, size
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client
from hpcaccel.service.page import states
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place, place_of

__all__ = ["register_texts", "texts_layout"]

TABS = ("log", "spec", "script", "changes", "checkpoints", "usage")
LINES = 1000
"""Lines of the merged log on the page; all of them are in the files."""


def texts_layout() -> html.Section:
    """The tabs, and the place of their content."""
    return html.Section(
        className="card texts",
        children=[
            html.Header(
                [
                    dmc.SegmentedControl(
                        id="run-tab", value="log", size="xs",
                        data=[{"value": name, "label": name.capitalize()} for name in TABS],
                    ),
                    dmc.TextInput(
                        id="run-find", placeholder="Search in the log", size="xs", debounce=250, className="filter",
                        rightSection=html.Kbd("/"), **{"aria-label": "Search in the log"},
                    ),
                ]
            ),
            html.Div(id="run-text"),
            dcc.Store(id="run-text-seen", data=""),
        ],
    )  # fmt: skip


def register_texts(app: Dash, calls: ClientCalls) -> None:
    """Add the callback of the tabs."""

    @app.callback(
        Output("run-text", "children"),
        Output("run-text-seen", "data"),
        Input("tick", "data"),
        Input("run-tab", "value"),
        Input("run-find", "value"),
        State("run-text-seen", "data"),
        State("url", "pathname"),
    )
    async def show(_: Any, tab: str, find: str | None, seen: str, path: str) -> Any:
        place = place_of(path)
        if place.page != "run":
            return no_update, no_update
        try:
            content = await calls(lambda client: _content(client, place, tab, find or ""))
        except HpcaccelError as error:
            content = html.P(states.reason_of(error), className="hollow")
        digest = sha256(json.dumps([tab, content], cls=PlotlyJSONEncoder).encode()).hexdigest()
        return (no_update, no_update) if digest == seen else (content, digest)


def _content(client: Client, place: Place, tab: str, find: str) -> Any:
    if tab == "log":
        return _log(client, place, find)
    if tab == "spec":
        return _text(client.spec(place.ident), place.api(f"runs/{place.ident}/spec"), "job.yaml")
    if tab == "script":
        return _text(client.script(place.ident), place.api(f"runs/{place.ident}/script"), "job.sbatch")
    if tab == "changes":
        return _changes(client.diff(place.ident))
    if tab == "checkpoints":
        return _checkpoints(client.checkpoints(place.ident))
    return _usage(client.run(place.ident).usage)


def _log(client: Client, place: Place, find: str) -> Any:
    failed = client.traceback(place.ident)
    lines = client.merged_log(place.ident, limit=LINES).splitlines()
    shown = [line for line in lines if find.lower() in line.lower()]
    first = []
    if failed is not None:
        first = [
            html.Div([html.Strong(f"Rank {failed[0]} failed first"), html.Pre(failed[1])], className="callout is-bad")
        ]
    if not lines:
        return [
            *first,
            html.P("Nothing has been written yet. The log begins when the ranks have started.", className="hollow"),
        ]
    if not shown:
        return [*first, html.P(f"None of the newest {len(lines)} lines contains “{find}”.", className="hollow")]
    links = [
        html.A(f"{name} ({size(count)})", href=place.api(f"runs/{place.ident}/logs/{name}"), target="_blank")
        for name, count in list(client.logs(place.ident).items())[:12]
    ]
    return [*first, html.Pre("\n".join(shown), className="log", id="run-log"), html.P(links, className="files")]


def _text(text: str, href: str, name: str) -> list[Any]:
    link = html.A(f"Download {name}", href=href, download=name)
    return [html.Pre(text, className="log is-top"), html.P(link, className="files")]


def _changes(text: str) -> Any:
    if not text.strip():
        return html.P(
            "No changes: this is the first run of its name, or nothing differs from the previous one.",
            className="hollow",
        )
    looks = {"+": "is-added", "-": "is-removed", "@": "muted"}
    lines = [html.Span(f"{line}\n", className=looks.get(line[:1], "")) for line in text.splitlines()]
    return html.Pre(lines, className="log is-top")


def _checkpoints(found: list[dict[str, Any]]) -> Any:
    if not found:
        return html.P("No checkpoint yet. Save writes one now, without a stop.", className="hollow")
    rows = []
    for one in reversed(found):
        good = one.get("good")
        step, when, count = one.get("step"), one.get("time"), one.get("bytes")
        rows.append(
            html.Tr(
                [
                    html.Td("" if step is None else f"{step:,}", className="number"),
                    html.Td(str(one.get("path", "")).rpartition("/")[2], className="mono"),
                    html.Td(clock_time(when) if when else "", className="number muted"),
                    html.Td(size(count) if count is not None else "", className="number"),
                    html.Td(one.get("reason") or ""),
                    html.Td(one.get("guarantee") or "", className="muted"),
                    html.Td(one.get("problem") or "" if good is False else "intact" if good else "", className="wide"),
                ]
            )
        )
    return _table(("Step", "Directory", "Saved", "Size", "Because", "Guarantee", ""), rows)


def _usage(found: Any) -> Any:
    usage = found if isinstance(found, dict) else None if found is None else _plain(found)
    if not usage or not (usage.get("nodes") or usage.get("gpus")):
        return html.P("No samples yet: the job writes one every 15 seconds while it runs.", className="hollow")
    nodes = [
        html.Tr([html.Td(one["node"]), html.Td(_share(one.get("cpu_share"), one.get("cpus")), className="number"),
                 html.Td(_of(one.get("memory_peak_bytes"), one.get("memory_limit_bytes")), className="number"),
                 html.Td(_of(one.get("io_read_bytes"), None), className="number"),
                 html.Td(_of(one.get("io_write_bytes"), None), className="number wide")])
        for one in usage.get("nodes", [])
    ]  # fmt: skip
    gpus = [
        html.Tr([html.Td(one["node"]), html.Td(one.get("name") or ""), html.Td(one["uuid"], className="mono muted"),
                 html.Td(_percent(one.get("mean_utilization")), className="number"),
                 html.Td(_of(one.get("memory_peak_bytes"), one.get("memory_total_bytes")), className="number"),
                 html.Td(duration(one.get("idle_seconds") or 0.0), className="number"),
                 html.Td(_energy(one.get("energy_kwh")), className="number wide")])
        for one in usage.get("gpus", [])
    ]  # fmt: skip
    parts = [_table(("Node", "CPUs in use", "Memory, peak", "Read", "Written"), nodes)]
    if gpus:
        parts.append(_table(("Node", "GPU", "UUID", "Mean use", "Memory, peak", "Idle", "Energy"), gpus))
    return parts


def _plain(found: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)


def _share(share: float | None, cpus: int | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %" + ("" if cpus is None else f" of {cpus}")


def _energy(kwh: float | None) -> str:
    return "" if kwh is None else f"{kwh:.2f} kWh"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _of(count: float | None, limit: float | None) -> str:
    return "" if count is None else size(count) + ("" if limit is None else f" of {size(limit)}")


def _table(heads: tuple[str, ...], rows: list[Any]) -> html.Div:
    head = html.Thead(html.Tr([html.Th(name) for name in heads]))
    return html.Div(html.Table([head, html.Tbody(rows)], className="plain-table"), className="scroll-x")
