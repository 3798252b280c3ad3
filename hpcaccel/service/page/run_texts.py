"""The texts at the end of a run's page: log with the first traceback on top, spec, script, changes; and its tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html, no_update
from plotly.utils import PlotlyJSONEncoder

from hpcaccel.core.formatting import size
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client
from hpcaccel.service.page import elements
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place, place_of
from hpcaccel.service.page.plain_tables import checkpoints_table, profiles_table, usage_tables
from hpcaccel.view.rank_states import blame_of

__all__ = ["register_texts", "texts_layout"]

TABS = ("log", "spec", "script", "changes", "checkpoints", "usage", "profiles")
LINES = 1000
"""Lines of the merged log on the page; all of them are in the files."""
TAIL_BYTES = 128 << 10
"""The end of a single log file that the page shows."""
MERGED = "merged"
SOURCES = 4
"""So many ranks are named above lines that they have in common."""


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
                    html.Div(
                        id="run-log-tools",
                        className="tools",
                        children=[
                            dmc.Select(
                                id="run-file", value=MERGED, data=_files({}), size="xs", allowDeselect=False,
                                className="log-file", **elements.labelled("Log file"),
                            ),
                            dmc.TextInput(
                                id="run-find", placeholder="Search in the log", size="xs", debounce=250,
                                className="filter", rightSection=html.Kbd("/"),
                                    **elements.labelled("Search in the log"),
                            ),
                        ],
                    ),
                ]
            ),
            html.Div(id="run-text", children=html.P("", className="hollow")),
            dcc.Store(id="run-text-seen", data=""),
        ],
    )  # fmt: skip


def register_texts(app: Dash, calls: ClientCalls) -> None:
    """Add the callback of the tabs."""

    @app.callback(
        Output("run-text", "children"),
        Output("run-file", "data"),
        Output("run-log-tools", "hidden"),
        Output("run-text-seen", "data"),
        Input("tick", "data"),
        Input("run-tab", "value"),
        Input("run-file", "value"),
        Input("run-find", "value"),
        State("run-text-seen", "data"),
        State("url", "pathname"),
    )
    async def show(_: Any, tab: str, file: str, find: str | None, seen: str, path: str) -> Any:
        place = place_of(path)
        if place.page != "run":
            return (no_update,) * 4
        content: Any = None
        files: Any = no_update
        try:
            if tab == "log":
                content, files = await calls(lambda client: _log(client, place.ident, file, find or ""))
            else:
                content = await calls(lambda client: _content(client, place, tab))
        except HpcaccelError as error:
            content = html.P(elements.reason_of(error), className="hollow")
        shown = json.dumps([tab, content, None if files is no_update else files], cls=PlotlyJSONEncoder)
        digest = sha256(shown.encode()).hexdigest()
        return (no_update,) * 4 if digest == seen else (content, files, tab != "log", digest)


def _content(client: Client, place: Place, tab: str) -> Any:
    run = place.ident
    if tab == "spec":
        return _text(client.spec(run), place.api(f"runs/{run}/spec"), "job.yaml")
    if tab == "script":
        return _text(client.script(run), place.api(f"runs/{run}/script"), "job.sbatch")
    if tab == "changes":
        return _changes(client.diff(run))
    if tab == "checkpoints":
        return checkpoints_table(client.checkpoints(run))
    if tab == "profiles":
        return profiles_table(client.profiles(run), lambda name: place.api(f"runs/{run}/profiles/{name}"))
    return usage_tables(client.run(run).usage)


def _log(client: Client, run: str, file: str, find: str) -> tuple[list[Any], list[dict[str, str]]]:
    """The log's lines below the first traceback, and the choice of files."""
    files = client.logs(run)
    failed = client.traceback(run)
    parts: list[Any] = []
    if failed is not None:
        one = client.run(run)
        title = html.Strong(blame_of(failed[0], one.ranks, one.error_class))
        parts.append(html.Div([title, html.Pre(failed[1])], className="callout is-bad", id="run-traceback"))
    lines = _lines(client, run, file if file in files else MERGED)
    shown = [(source, text) for source, text in lines if find.lower() in text.lower()]
    if not lines:
        parts.append(html.P("Nothing yet. The log begins when the ranks have started.", className="hollow"))
    elif not shown:
        parts.append(html.P(f"None of the newest {len(lines)} lines contains “{find}”.", className="hollow"))
    else:
        parts.append(html.Pre(_spans(shown), className="log", id="run-log"))
    return parts, _files(files)


def _lines(client: Client, run: str, file: str) -> list[tuple[str, str]]:
    """Source and text of each line."""
    if file != MERGED:
        return [("", line) for line in client.log(run, file, -TAIL_BYTES, TAIL_BYTES).text.splitlines()]
    return [(_source(line.sources), line.text) for line in client.merged_log(run, limit=LINES)]


def _source(names: list[str]) -> str:
    """Who wrote a line: ``rank 0``, ``ranks 0, 1 and 6 more``, ``supervisor``."""
    if len(names) < 2:
        return "".join(f"rank {name}" if name.isdigit() else name for name in names)
    more = f" and {len(names) - SOURCES} more" if len(names) > SOURCES else ""
    return f"ranks {', '.join(names[:SOURCES])}{more}"


def _spans(lines: Sequence[tuple[str, str]]) -> list[Any]:
    """The lines, with their sources in grey; neighbours of the same source are one part."""
    parts: list[Any] = []
    before = None
    for source, text in lines:
        if source and source != before:
            parts.append(html.Span(f"{source}\n", className="log-source"))
            before = source
        if parts and isinstance(parts[-1], str):
            parts[-1] += f"{text}\n"
        else:
            parts.append(f"{text}\n")
    return parts


def _files(files: dict[str, int]) -> list[dict[str, str]]:
    choices = [{"value": name, "label": f"{name} ({size(count)})"} for name, count in files.items()]
    return [{"value": MERGED, "label": "All ranks, newest attempt"}, *choices]


def _text(text: str, href: str, name: str) -> list[Any]:
    link = html.A(f"Download {name}", href=href, download=name)
    return [html.Pre(text, className="log"), html.P(link, className="files")]


def _changes(text: str) -> Any:
    if not text.strip():
        return html.P("No changes since the previous run of this name, or there is none.", className="hollow")
    looks = {"+": "is-added", "-": "is-removed", "@": "muted"}
    lines = [html.Span(f"{line}\n", className=looks.get(line[:1], "")) for line in text.splitlines()]
    return html.Pre(lines, className="log")
