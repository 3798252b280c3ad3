"""The page of one run."""

from __future__ import annotations

from dash import Dash, html

from hpcaccel.service.page import states
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import Place

__all__ = ["layout", "register"]


def layout(place: Place) -> html.Div:
    """The page, without data."""
    return html.Div(className="page", children=states.loading())


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the page."""
