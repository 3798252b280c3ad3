"""Layout of the page that submits: the form, the YAML, the expected start, and the batch script."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import dash_mantine_components as dmc
from dash import dcc, html

from hpcaccel.service.page import elements
from hpcaccel.service.page.place import Place

__all__ = ["EMPTY", "layout"]

EMPTY = """\
name: my-run
entrypoint:
  script: train.py
slurm:
  nodes: 1
  time: "01:00:00"
"""


def layout(place: Place) -> html.Div:
    """The page; the form arrives with the schema."""
    return html.Div(
        className="page is-full submit-page",
        children=[
            dcc.Store(id="submit-key", data=uuid4().hex),
            dcc.Store(id="submit-directory", data=None),
            dcc.Store(id="submit-begun", data=None),
            dcc.Store(id="submit-problems", data=[]),
            dcc.Store(id="submit-synced", data=0),
            _bar(),
            html.Div(id="submit-result", role="status"),
            html.Div(
                className="submit-columns",
                children=[
                    html.Section([html.H2("Form"), html.Div(id="submit-form", children=elements.loading())]),
                    html.Section([html.Header([html.H2("YAML"), html.Span(id="submit-state")]), *_editor()]),
                    html.Section(_outcome()),
                ],
            ),
        ],
    )


def _bar() -> html.Header:
    return html.Header(
        className="bar",
        children=[
            html.H1("Submit"),
            dmc.Select(
                id="submit-start", placeholder="Start from a run, a sweep or a file", data=[], size="xs",
                clearable=True, searchable=True, className="submit-start", **{"aria-label": "Start from"},
            ),
            dmc.Select(
                id="submit-cluster", placeholder="Default cluster", data=[], size="xs", clearable=True,
                className="submit-cluster", **{"aria-label": "Cluster"},
            ),
            html.Button("Submit", id="submit-go", className="button is-main", disabled=True),
        ],
    )  # fmt: skip


def _editor() -> list[Any]:
    # Read-only until the spec to start from has arrived: it would replace what was typed before.
    area = dmc.Textarea(
        id="submit-yaml", value=EMPTY, debounce=400, autosize=True, minRows=16, spellCheck=False, variant="unstyled",
        className="submit-area", readOnly=True, **{"aria-label": "Spec as YAML"},
    )  # fmt: skip
    return [
        html.Div([html.Div(id="submit-gutter", role="presentation"), area], className="submit-editor"),
        html.Div(id="submit-list", className="submit-problems"),
    ]


def _outcome() -> list[Any]:
    return [
        html.Header([html.H2("When it would start"), html.Button("Ask Slurm", id="submit-ask", className="button")]),
        html.Div(
            id="submit-plan",
            className="submit-plan",
            children="Slurm is queried for the expected start. Nothing is submitted.",
        ),
        html.H2("Batch script"),
        html.Pre(id="submit-script", className="submit-script", children=""),
    ]
