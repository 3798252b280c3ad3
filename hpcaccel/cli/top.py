"""``top``: the runs of this account in a terminal, with actions."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from hpcaccel.cli.options import RUN_HELP
from hpcaccel.cli.remote.target_cluster import cluster_of_run
from hpcaccel.cli.run_names import complete_run, find
from hpcaccel.errors import UserError

__all__ = ["top"]


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help=f"Open this run at once. {RUN_HELP}", show_default=False, autocompletion=complete_run
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of runs to show.")] = 200,
) -> None:
    """Watch and steer runs in the terminal: list, one run, its log and script.

    Keys are shown at the bottom. Needs hpcaccel[ui].
    """
    if run is not None and (there := cluster_of_run(run)) is not None:
        host = there[0].profile.host
        raise UserError(f"{there[0].name} is behind SSH: log in (ssh {host}), and run `hpcaccel top {there[1]}` there")
    if importlib.util.find_spec("textual") is None:
        raise UserError(f"top needs textual, which is not installed for {sys.executable}: pip install 'hpcaccel[ui]'")
    first = None if run is None else find(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("top needs a terminal: over SSH use ssh -t; in scripts use `hpcaccel list --json` or status")
    from hpcaccel.top.top_app import TopApp
    from hpcaccel.top.watched_runs import WatchedRuns

    TopApp(WatchedRuns(count), first=None if first is None else str(first.path)).run()
