"""``shell``: a shell on a node of a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.options import RunName

__all__ = ["shell"]


def shell(
    run: RunName,
    node: Annotated[
        str | None, typer.Option(metavar="N", help="A node's name or its index in the job.", show_default=False)
    ] = None,
) -> None:
    """Open a shell on a node of the running job, beside its ranks."""
