"""``clean``: old runs and checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.completion import run_names
from hpcaccel.cli.options import RUN_HELP, Cluster, Json, RunsDir
from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.cleaning import Cleaning, Item

__all__ = ["clean"]

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN_KEPT = 10


def clean(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help=f"{RUN_HELP} Without any: all runs.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only runs without a sign for so long: 30d, 12h, 2w.")
    ] = "30d",
    whole_runs: Annotated[
        bool,
        typer.Option("--runs", help="Whole runs that are done or have nothing to go on from, not only checkpoints."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is touched, only told.")] = False,
    runs_dir: RunsDir = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Delete old checkpoints, and old runs with --runs; tells first, deletes with --yes.

    What runs or waits, what is pinned, and each run's newest good checkpoint stay. With the profile of a cluster behind
    SSH it is about the runs there.
    """
    from hpcaccel.core.run_dir import default_runs_dir
    from hpcaccel.submission import all_runs, find_run
    from hpcaccel.submission.cleaning import plan_cleaning

    seconds = _age(older_than)
    chosen = [find_run(name, runs_dir=runs_dir) for name in runs] if runs else all_runs(runs_dir)
    folders = [] if runs else [default_runs_dir(runs_dir), *(run.path.parent.parent for run in chosen)]
    plan = plan_cleaning(chosen, older_than_seconds=seconds, whole_runs=whole_runs, folders=folders)
    done, failed = _go_through(plan, yes=yes, tell=not json)
    if json:
        print_json({**plan.to_json(), "deleted": yes, "failed": failed})
    else:
        _tell_kept(plan)
        _sum_up(done, yes=yes)
    if failed:
        raise typer.Exit(1)


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text!r} is no age: a number and m, h, d or w, such as 30d")
    return float(int(match[1]) * _UNITS[match[2]])


def _go_through(plan: Cleaning, *, yes: bool, tell: bool) -> tuple[list[Item], list[str]]:
    """What was deleted, or would be, and what went wrong; told as it goes on, since large folders take their time."""
    from hpcaccel.submission.cleaning import Origins, delete
    from hpcaccel.view.formatting import size

    done: list[Item] = []
    failed: list[str] = []
    origins = Origins()
    for item in plan.items:
        if yes:
            try:
                delete(item, origins=origins)
            except HpcaccelError as error:
                failed.append(str(error))
                if tell:
                    note(f"error: {error}")
                continue
        done.append(item)
        if tell:
            typer.echo(f"{'deleted' if yes else 'would delete'} {size(item.bytes):>9}  {item.path}  ({item.why})")
    return done, failed


def _tell_kept(plan: Cleaning) -> None:
    from hpcaccel.view.formatting import clean as clean_text

    for run_id, why in plan.kept[:_SHOWN_KEPT]:
        note(f"kept {run_id}: {clean_text(why)}")
    if len(plan.kept) > _SHOWN_KEPT:
        note(f"and {len(plan.kept) - _SHOWN_KEPT} more runs are kept")


def _sum_up(done: list[Item], *, yes: bool) -> None:
    from hpcaccel.view.formatting import size

    count, together = len(done), size(sum(item.bytes for item in done))
    what = f"{count} {'thing' if count == 1 else 'things'}, {together}" if count else "nothing"
    typer.echo(f"{'deleted' if yes else 'would delete'} {what}{'' if yes or not count else '; do it with --yes'}")
