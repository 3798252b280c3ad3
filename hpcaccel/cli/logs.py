"""``logs``: what the ranks printed."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.options import RUN_HELP

__all__ = ["logs"]


def logs(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Without it: the latest run.", show_default=False)
    ] = None,
    rank: Annotated[str, typer.Option(metavar="N", help="A rank, 'all', 'supervisor' or 'batch'.")] = "0",
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="This attempt only. Without it: the newest.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
) -> None:
    """Show what a run printed."""
