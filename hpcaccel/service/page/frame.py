"""The frame of all pages: navigation, colours, keyboard, the connection, and the choice of the page."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, dcc, html

from hpcaccel.service.page import (
    confirm,
    elements,
    run_page,
    runs_table,
    submit_layout,
    submit_page,
    sweep_page,
    sweeps_table,
)
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.elements import labelled
from hpcaccel.service.page.place import Place, place_of

__all__ = ["layout", "register"]

PAGES = (("runs", "Runs", "g r"), ("sweeps", "Sweeps", "g s"), ("submit", "Submit", "g n"))
"""Name, title and keys of the pages in the navigation."""
KEYS = (
    ("g r", "Runs"),
    ("g s", "Sweeps"),
    ("g n", "Submit a job"),
    ("/", "Filter, or search in a log"),
    ("j  k", "Next, previous row"),
    ("Enter", "Open the row"),
    ("x", "Select the row"),
    ("d", "Light or dark"),
    ("?", "This list"),
    ("Esc", "Close"),
)
DEMO = "Demo: recorded runs, with times shifted to today. Actions and Submit change nothing."
HERE: Any = {"aria-current": "page"}
THEME = {
    "primaryColor": "indigo",
    "defaultRadius": "sm",
    "colors": {
        "dark": [
            "#e8e9ed",
            "#b6bac4",
            "#9095a1",
            "#646975",
            "#33373f",
            "#26292f",
            "#1a1c21",
            "#15171b",
            "#121417",
            "#0f1013",
        ],
    },
    "fontFamily": "var(--h-sans)",
    "fontFamilyMonospace": "var(--h-mono)",
    "headings": {"fontFamily": "var(--h-sans)", "fontWeight": "600"},
}


def layout(*, demo: bool = False) -> dmc.MantineProvider:
    """The frame, the same for all pages.

    Args:
        demo: whether the runs are recorded ones, which the frame shows.
    """
    return dmc.MantineProvider(
        id="theme",
        theme=THEME,
        children=[
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="tick", data=0),
            dcc.Store(id="place"),
            *confirm.parts(),
            dmc.NotificationContainer(id="notices", position="bottom-right", zIndex=500),
            html.Div(id="offline", className="offline", role="status", hidden=True),
            html.Div(DEMO, className="demo-note", hidden=not demo),
            html.Div(
                className="shell",
                children=[
                    html.Nav(
                        className="side",
                        children=[
                            html.Div(id="navigation", className="nav"),
                            html.Div(
                                className="side-end",
                                children=[
                                    html.Button("?", id="show-keys", className="icon-button", title="Keys (?)"),
                                    html.Button(
                                        html.Span(className="icon i-moon"),
                                        id="scheme",
                                        className="icon-button",
                                        title="Light or dark (d)",
                                        **labelled("Light or dark"),
                                    ),
                                ],
                            ),
                        ],
                    ),
                    html.Main(id="main", className="main", children=elements.loading()),
                ],
            ),
            dmc.Modal(id="keys", title="Keys", centered=True, size="sm", children=_keys(), zIndex=400),
        ],
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the callbacks of the frame and of all pages."""

    @app.callback(
        Output("main", "children"), Output("navigation", "children"), Output("place", "data"), Input("url", "pathname")
    )
    def show(path: str | None) -> tuple[Any, Any, Any]:
        place = place_of(path or "/")
        return _page(place), _navigation(place), {"page": place.page, "ident": place.ident, "prefix": place.prefix}

    app.clientside_callback(
        ClientsideFunction("hpcaccel", "scheme"), Output("theme", "forceColorScheme"), Input("scheme", "n_clicks")
    )
    app.clientside_callback(
        ClientsideFunction("hpcaccel", "open"),
        Output("keys", "opened"),
        Input("show-keys", "n_clicks"),
        prevent_initial_call=True,
    )
    runs_table.register(app, calls)
    run_page.register(app, calls)
    sweeps_table.register(app, calls)
    sweep_page.register(app, calls)
    submit_page.register(app, calls)


def _page(place: Place) -> Any:
    if place.page == "runs":
        return runs_table.layout(place)
    if place.page == "run":
        return run_page.layout(place)
    if place.page == "sweeps":
        return sweeps_table.layout(place)
    if place.page == "sweep":
        return sweep_page.layout(place)
    if place.page == "submit":
        return submit_layout.layout(place)
    return elements.nothing(
        "There is no such page", "The address is wrong, or the page has moved.", place.href("runs"), "All runs"
    )


def _navigation(place: Place) -> list[Any]:
    shown = {"run": "runs", "sweep": "sweeps"}.get(place.page, place.page)
    return [
        html.A(html.Span("hpcaccel", className="brand-name"), href=place.href("runs"), className="brand"),
        *[
            html.A(
                [html.Span(className=f"icon i-{name}"), html.Span(title), html.Kbd(keys, className="nav-keys")],
                href=place.href(name),
                className="nav-item" + (" is-here" if name == shown else ""),
                **HERE if name == shown else {},
            )
            for name, title, keys in PAGES
        ],
    ]


def _keys() -> html.Dl:
    return html.Dl(
        className="keys",
        children=[
            part for keys, text in KEYS for part in (html.Dt([html.Kbd(key) for key in keys.split()]), html.Dd(text))
        ],
    )
