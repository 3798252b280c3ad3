"""Elements that several pages share: an empty list, an error, a part that is still loading, a run's state."""

from __future__ import annotations

from typing import Any

from dash import html

from hpcaccel.errors import HpcaccelError

__all__ = ["badge", "failed", "labelled", "loading", "nothing", "reason_of"]


def nothing(title: str, text: Any, href: str = "", link: str = "") -> html.Div:
    """A state without data: what is missing, and what to do."""
    return html.Div(
        className="blank",
        children=[
            html.H2(title),
            html.P(text),
            *([html.A(link, href=href, className="button is-main")] if href else []),
        ],
    )


def failed(error: Exception, href: str = "", link: str = "") -> html.Div:
    """The element shown after a failed request, with the service's error message."""
    return nothing("This cannot be shown", reason_of(error), href, link)


def reason_of(error: Exception) -> str:
    """The sentence of an error for the user."""
    if isinstance(error, HpcaccelError):
        return str(error)
    if isinstance(error, OSError):
        return f"the service does not respond ({error.strerror or error})"
    raise error


def loading() -> html.Div:
    """Grey bars, until the first data arrive."""
    return html.Div(className="loading", children=[html.Div(className="bone") for _ in range(6)])


def labelled(text: str) -> Any:
    """A component's name for screen readers, as keyword arguments."""
    return {"aria-label": text}


def badge(state: str) -> html.Span:
    """A run's state, with its colour."""
    return html.Span([html.Span(className="dot"), state], className=f"state s-{state}")
