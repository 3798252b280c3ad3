"""Callbacks of the page that submits: they keep form and YAML consistent, check the spec, plan its start, submit it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, html, no_update, set_props

from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.service.client import Client
from hpcaccel.service.page import elements
from hpcaccel.service.page.checked_text import checked, expected_starts
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import place_of
from hpcaccel.service.page.submit_fields import FormField, form_sections
from hpcaccel.service.page.submit_form import FIELD, form, input_value, spec_value
from hpcaccel.service.page.submit_layout import EMPTY
from hpcaccel.service.page.submit_yaml import values_of, with_value

__all__ = ["register"]

KINDS = ("run", "sweep", "file")
"""What ``?run=ID``, ``?sweep=ID`` and ``?file=PATH`` in the address start from."""
NEWEST = 30
"""Runs and sweeps that can be chosen as a start."""


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the page."""
    fields: dict[str, FormField] = {}
    _register_start(app, calls, fields)
    _register_sync(app, fields)
    _register_checks(app, calls)
    _register_submit(app, calls)


def _register_start(app: Dash, calls: ClientCalls, fields: dict[str, FormField]) -> None:
    @app.callback(
        Output("submit-form", "children"),
        Output("submit-start", "data"),
        Output("submit-cluster", "data"),
        Output("submit-start", "value"),
        Output("submit-yaml", "value", allow_duplicate=True),
        Output("submit-directory", "data"),
        Output("submit-result", "children", allow_duplicate=True),
        Output("submit-yaml", "readOnly"),
        Output("submit-begun", "data"),
        Input("submit-key", "id"),
        State("url", "search"),
        prevent_initial_call="initial_duplicate",
    )
    async def begin(_: str, search: str | None) -> Any:
        try:
            schema, starts, clusters = await calls(_choices)
        except HpcaccelError as error:
            return elements.failed(error), [], [], None, EMPTY, None, None, False, None
        sections = form_sections(schema)
        fields.update({one.key: one for section in sections for one in section.fields})
        asked = parse_qs((search or "").lstrip("?"))
        kind, name = next(((kind, asked[kind][0]) for kind in KINDS if kind in asked), ("", ""))
        if not kind:
            return form(sections, values_of(EMPTY) or {}), starts, clusters, None, EMPTY, None, None, False, None
        chosen = f"{kind}:{name}"
        if all(chosen != one["value"] for group in starts for one in group["items"]):
            starts.insert(0, {"group": "Chosen", "items": [{"value": chosen, "label": f"{kind} {name}"}]})
        try:
            text, directory = await calls(lambda client: _start(client, kind, name))
        except HpcaccelError as error:
            refused = _refused(elements.reason_of(error))
            return form(sections, values_of(EMPTY) or {}), starts, clusters, None, EMPTY, None, refused, False, None
        return form(sections, values_of(text) or {}), starts, clusters, chosen, text, directory, None, False, chosen

    @app.callback(
        Output("submit-result", "children", allow_duplicate=True),
        Input("submit-start", "value"),
        State("submit-begun", "data"),
        prevent_initial_call=True,
    )
    async def start_from(chosen: str | None, begun: str | None) -> Any:
        set_props("submit-begun", {"data": None})
        if not chosen or chosen == begun:
            return no_update
        kind, _, name = chosen.partition(":")
        try:
            text, directory = await calls(lambda client: _start(client, kind, name))
        except HpcaccelError as error:
            return _refused(elements.reason_of(error))
        set_props("submit-directory", {"data": directory})
        set_props("submit-yaml", {"value": text})
        return None


def _choices(client: Client) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    runs = [("run", one.run_id, f"{one.name}  {one.run_id}") for one in client.runs(limit=NEWEST).runs]
    sweeps = [("sweep", one.run_id, f"{one.name}  {one.run_id}") for one in client.sweeps(limit=NEWEST).runs]
    known = {run_id for _, run_id, _ in sweeps}
    runs = [one for one in runs if one[1] not in known]
    files = [("file", name, name) for name in client.spec_files()]
    groups = (("Files", files), ("Runs", runs), ("Best of a sweep", sweeps))
    starts = [
        {"group": title, "items": [{"value": f"{kind}:{name}", "label": label} for kind, name, label in some]}
        for title, some in groups
        if some
    ]
    clusters = [one["name"] for one in client.clusters()]
    return client.schema(), starts, [*clusters, *({"slurm", "local"} - set(clusters))]


def _start(client: Client, kind: str, name: str) -> tuple[str, str | None]:
    if kind == "file":
        return client.spec_file(name)
    return (client.spec(name) if kind == "run" else client.best(name)), None


def _register_sync(app: Dash, fields: dict[str, FormField]) -> None:
    inputs = {"type": FIELD, "path": ALL}

    # The text and the fields are written with set_props. As outputs they would form a circle, and Dash would drop a
    # check that waits for a callback which then changes nothing.

    @app.callback(
        Output("submit-result", "children", allow_duplicate=True),
        Input(inputs, "value"),
        State(inputs, "id"),
        State("submit-yaml", "value"),
        prevent_initial_call=True,
    )
    def to_yaml(shown: list[Any], ids: list[dict[str, str]], text: str) -> Any:
        source = ctx.triggered_id
        if not isinstance(source, dict) or len(ctx.triggered) != 1:
            return no_update  # the form has just been shown, or several fields follow the text
        value = next(one for one, each in zip(shown, ids, strict=True) if each["path"] == source["path"])
        field = fields[source["path"]]
        values = values_of(text or "")
        if values is not None and input_value(field, values) == value:
            return no_update
        try:
            set_props("submit-yaml", {"value": with_value(text or "", field.path, spec_value(field, value))})
        except UserError as error:
            return _refused(str(error))
        return None

    @app.callback(
        Output("submit-synced", "data"),
        Input("submit-yaml", "value"),
        Input(inputs, "id"),
        State(inputs, "value"),
    )
    def to_form(text: str, ids: list[dict[str, str]], shown: list[Any]) -> Any:
        values = values_of(text or "")
        for one, before in zip(ids, shown, strict=True):
            field = fields.get(one["path"])
            value = before if field is None or values is None else input_value(field, values)
            if value != before:
                set_props(one, {"value": value})
        return no_update


def _register_checks(app: Dash, calls: ClientCalls) -> None:
    @app.callback(
        Output("submit-problems", "data"),
        Output("submit-list", "children"),
        Output("submit-state", "children"),
        Output("submit-script", "children"),
        Output("submit-go", "disabled"),
        Output("submit-go", "children"),
        Output({"type": FIELD, "path": ALL}, "error"),
        Input("submit-yaml", "value"),
        Input("submit-cluster", "value"),
        Input({"type": FIELD, "path": ALL}, "id"),
        State("submit-directory", "data"),
    )
    async def check(text: str, cluster: str | None, ids: list[dict[str, str]], directory: str | None) -> Any:
        found = await calls(lambda client: checked(client, text or "", cluster, directory))
        errors = [found.at_field(one["path"]) for one in ids]
        script = no_update if found.script is None else found.script
        label = "Start sweep" if found.is_sweep else "Submit"
        return found.lines, found.shown(), found.state(), script, not found.valid, label, errors

    app.clientside_callback(
        ClientsideFunction("hpcaccelSubmit", "gutter"),
        Output("submit-gutter", "title"),
        Input("submit-problems", "data"),
        Input("submit-yaml", "value"),
    )

    @app.callback(
        Output("submit-plan", "children"),
        Input("submit-ask", "n_clicks"),
        State("submit-yaml", "value"),
        State("submit-cluster", "value"),
        State("submit-directory", "data"),
        prevent_initial_call=True,
        running=[(Output("submit-ask", "disabled"), True, False)],
    )
    async def plan(clicked: int | None, text: str, cluster: str | None, directory: str | None) -> Any:
        if not clicked:
            return no_update
        return await calls(lambda client: expected_starts(client, text or "", cluster, directory))


def _register_submit(app: Dash, calls: ClientCalls) -> None:
    @app.callback(
        Output("submit-result", "children"),
        Output("submit-key", "data"),
        Input("submit-go", "n_clicks"),
        State("submit-yaml", "value"),
        State("submit-cluster", "value"),
        State("submit-directory", "data"),
        State("submit-key", "data"),
        State("url", "pathname"),
        prevent_initial_call=True,
        running=[(Output("submit-go", "className"), "button is-main is-busy", "button is-main")],
    )
    async def go(
        clicked: int | None, text: str, cluster: str | None, directory: str | None, key: str, path: str
    ) -> Any:
        if not clicked:
            return no_update, no_update
        is_sweep = "sweep" in (values_of(text) or {})
        # The same text keeps its key until it was submitted, so that a second click submits nothing again.
        once = sha256(f"{key} {cluster} {text}".encode()).hexdigest()[:40]
        options = {"cluster": cluster, "directory": directory, "idempotency_key": once}
        try:
            run = await calls(lambda client: (client.start_sweep if is_sweep else client.submit)(text, **options))
        except (HpcaccelError, OSError) as error:
            return _refused(elements.reason_of(error)), no_update
        href = place_of(path).href("sweep" if is_sweep else "run", run.run_id)
        kind = "Sweep" if is_sweep else "Run"
        said: list[Any] = [
            html.A(f"{kind} {run.run_id}", href=href, id="submit-run"),
            f" is in the queue as job {run.job_id}.",
        ]
        if not run.job_id:
            said = [html.A(f"{kind} {run.run_id}", href=href, id="submit-run"), " was submitted."]
        notes = [html.P(warning) for warning in run.warnings]
        return html.Div([html.P(said), *notes], className="submit-done"), uuid4().hex


def _refused(reason: str) -> html.Div:
    return html.Div(reason, className="submit-refused", role="alert")
