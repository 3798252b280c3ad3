"""``clean``: old runs and checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import RUN_HELP, Cluster, Json, RunsDir
from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.cleaning import Cleaning

__all__ = ["clean"]

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN_KEPT = 10


def clean(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help=f"{RUN_HELP} Without any: all runs.", show_default=False),
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
    from hpcaccel.submission import all_runs, find_run
    from hpcaccel.submission.cleaning import plan_cleaning

    seconds = _age(older_than)
    chosen = [find_run(name, runs_dir=runs_dir) for name in runs] if runs else all_runs(runs_dir)
    plan = plan_cleaning(chosen, older_than_seconds=seconds, whole_runs=whole_runs)
    failed = _delete(plan) if yes else []
    if json:
        print_json({**plan.to_json(), "deleted": yes, "failed": failed})
    else:
        _tell(plan, yes=yes)
        for problem in failed:
            note(f"error: {problem}")
    if failed:
        raise typer.Exit(1)


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text!r} is no age: a number and m, h, d or w, such as 30d")
    return float(int(match[1]) * _UNITS[match[2]])


def _delete(plan: Cleaning) -> list[str]:
    from hpcaccel.submission.cleaning import delete

    failed = []
    for item in plan.items:
        try:
            delete(item)
        except HpcaccelError as error:
            failed.append(str(error))
    return failed


def _tell(plan: Cleaning, *, yes: bool) -> None:
    from hpcaccel.view.words import clean as clean_text
    from hpcaccel.view.words import size

    for item in plan.items:
        typer.echo(f"{'deleted' if yes else 'would delete'} {size(item.bytes):>9}  {item.path}  ({item.why})")
    for run_id, why in plan.kept[:_SHOWN_KEPT]:
        note(f"kept {run_id}: {clean_text(why)}")
    if len(plan.kept) > _SHOWN_KEPT:
        note(f"and {len(plan.kept) - _SHOWN_KEPT} more runs are kept")
    count = len(plan.items)
    what = "nothing" if not count else f"{count} {'thing' if count == 1 else 'things'}, {size(plan.bytes)}"
    typer.echo(f"{'deleted' if yes else 'would delete'} {what}{'' if yes or not count else '; do it with --yes'}")
