"""``docs``: pages of the documentation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.doc_pages import show_page

__all__ = ["docs"]


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Name of a page. Default: list the pages.", show_default=False),
    ] = None,
) -> None:
    """Show a page of the documentation in the terminal; without a topic, list the pages."""
    show_page(topic)
