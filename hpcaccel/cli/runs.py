"""``status``, ``list``, ``wait``: looking at runs."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.options import Json, RunName

__all__ = ["list_", "status", "wait"]


def status(run: RunName, json: Json = False) -> None:
    """Show where a run stands: state, attempts, step, losses."""


def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All runs; without it the newest 20.")] = False,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="So many of the newest runs.")] = 20,
    json: Json = False,
) -> None:
    """List the runs that were submitted from this account."""


def wait(run: RunName, json: Json = False) -> None:
    """Follow a run until it ends, and end with its own result as exit code.

    0 done, 1 failed, 85 paused, 130 cancelled. Ctrl-C leaves the run running.
    """
