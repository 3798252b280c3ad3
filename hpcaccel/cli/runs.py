"""``status``, ``list``, ``wait``: looking at runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import Cluster, Json, RunName
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.run_lookup import as_sweep, find
from hpcaccel.cli.sweep_messages import show, tell_of_age, wait_for_the_end
from hpcaccel.cli.wait import follow_to_the_end
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.run_handle import AnyRun

__all__ = ["list_", "status", "wait"]


def status(
    run: RunName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until the run ends.")] = False,
    json: Json = False,
) -> None:
    """Show where a run stands: state, attempts, step, losses."""
    if watch and json:
        raise UserError("--watch shows a page again and again, and --json prints one document: give one of the two")
    found = find(run)
    if watch:
        from hpcaccel.cli.watching import watch_status

        watch_status(found, lambda: _show_status(found, json=False))
    else:
        _show_status(found, json=json)


def _show_status(found: AnyRun, *, json: bool) -> None:
    from hpcaccel.view.run_overview import overview

    if (sweep := as_sweep(found)) is not None:
        show(sweep, json=json)
        return
    now = overview(found.dir, found.status())
    if json:
        print_json(now.to_json())
        return
    from hpcaccel.view.run_tables import print_status

    print_status(now)
    tell_of_age([now])


def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All runs, not only the newest.")] = False,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="So many of the newest runs.")] = 20,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """List the runs that were submitted from this account, newest first."""
    from hpcaccel.submission.find import known_runs
    from hpcaccel.view.listing import listed

    runs = [run.open().dir for run in reversed(known_runs())]
    chosen = runs if everything else runs[:count]
    shown = listed(chosen)
    if json:
        print_json([run.to_json() for run in shown])
        return
    from hpcaccel.view.run_tables import print_runs

    if not shown:
        note("there are no runs yet; start one with hpcaccel submit job.yaml")
        return
    print_runs(shown)
    tell_of_age(shown)
    if len(chosen) < len(runs):
        note(f"{len(runs) - len(chosen)} older runs are not shown; --all shows them")


def wait(run: RunName, json: Json = False) -> None:
    """Follow a run until it ends, and end with its own result as exit code.

    0 done, 1 failed, 85 paused, 130 cancelled. Ctrl-C leaves the run running.
    """
    found = find(run)
    if (sweep := as_sweep(found)) is not None:
        wait_for_the_end(sweep, json=json)
    follow_to_the_end(found.dir, json=json)
