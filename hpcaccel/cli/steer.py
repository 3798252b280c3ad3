"""``stop``, ``resume``, ``cancel``, ``pull``, ``clean``: steer runs, fetch their files, and delete old ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpcaccel.cli.options import RUN_HELP, Cluster, Json, RunName, RunsDir
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.forward import Secret
from hpcaccel.cli.remote.target_cluster import cluster_of_run
from hpcaccel.cli.run_names import as_sweep, complete_run, find
from hpcaccel.cli.sweep_messages import print_resumed
from hpcaccel.core.formatting import size
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.runs.clean import Cleaning, Item
    from hpcaccel.submission.runs.run_handle import AnyRun

__all__ = ["cancel", "clean", "pull", "resume", "save", "stop"]


def stop(
    run: RunName,
    requeue: Annotated[bool, typer.Option("--requeue", help="Save, exit, and requeue the job.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="End the training loop and run the code after it.")] = False,
) -> None:
    """Stop a run after a save; `resume` continues it from there.

    The ranks agree on one step, save a checkpoint and exit. Without an option the run is then paused.
    """
    if requeue and finish:
        raise UserError("--requeue cannot be combined with --finish")
    found = find(run)
    then: Literal["requeue", "finish", "pause"] = "requeue" if requeue else "finish" if finish else "pause"
    found.stop(then=then)
    typer.echo(f"stop requested for {found.run_id}: {_FOLLOWS[then].format(run=found.run_id)}")


def save(run: RunName) -> None:
    """Save a checkpoint now; the run continues.

    All ranks save after the same step. Programs that call neither hpcaccel's loop nor a stop gate ignore the request.
    """
    found = find(run)
    found.save()
    typer.echo(f"save requested for {found.run_id}: its ranks save after one of the next steps")


def resume(run: RunName, secret: Secret = None, json: Json = False) -> None:
    """Resume a run that was stopped or cancelled or has failed, from its newest checkpoint.

    The run of another user, shared with `sharing: group`, continues as a new run of your own.
    """
    found = find(run)
    if (sweep := as_sweep(found)) is not None:
        print_resumed(sweep, sweep.resume(), json=json)
        return
    if (owner := _other_owner(found)) is not None:
        from hpcaccel.submission.submit.continue_shared import continue_as_own

        note(f"{found.run_id} belongs to {owner}: a run of your own continues from its newest checkpoint")
        found = continue_as_own(found.dir)
    else:
        found.resume()
    job_id = found.job_id
    if json:
        print_json({"run_id": found.run_id, "job_id": job_id, "path": str(found.path)})
    else:
        typer.echo(f"{found.run_id} continues as job {job_id}; follow it: hpcaccel wait {found.run_id}")


def _other_owner(run: AnyRun) -> str | None:
    """The user who owns a run; None if it is this one."""
    from hpcaccel.submission.runs.run_owner import is_of_another_user, owner_of

    return owner_of(run.dir) if is_of_another_user(run.dir) else None


def cancel(run: RunName) -> None:
    """Cancel a run now. Only `resume` restarts it."""
    found = find(run)
    found.cancel()
    typer.echo(f"cancelled {found.run_id}")


_FOLLOWS = {
    "requeue": "it saves, exits and is requeued",
    "finish": "its training loop ends, and the code after the loop runs",
    "pause": "it saves and exits; resume it later with hpcaccel resume {run}",
}


# -- files of runs ------------------------------------------------------------------------------------------------


def pull(
    run: RunName,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH", help="Checkpoint to fetch as well: a step, 'last' or 'best'.", show_default=False
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Metric for 'best'. Default: the first of val_loss, eval_loss, valid_loss and loss that was logged.",
            show_default=False,
        ),
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="'best' is the largest value, not the smallest.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="Destination directory. Default: RUNS_DIR/NAME/RUN_ID on this machine.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Fetch a run's logs, metrics and records from the cluster, and optionally a checkpoint.

    Files that are already here are not fetched again. An interrupted pull continues where it stopped.
    """
    from hpcaccel.core.run_dir import default_runs_dir
    from hpcaccel.submission.remote.pulling import pull as fetch

    found = cluster_of_run(run)
    if found is None:
        raise UserError(f"{run!r} is on this machine or unknown. For a run on a cluster behind SSH, write CLUSTER:RUN")
    cluster, run_id = found
    base = default_runs_dir() if runs_dir is None else runs_dir.absolute()
    with cluster:
        pulled = fetch(
            cluster, run_id, None if out is None else out.absolute(),
            runs_dir=base, checkpoint=checkpoint, metric=metric, largest=largest,
        )  # fmt: skip
    if json:
        print_json(
            {"path": str(pulled.path), "files": pulled.files, "bytes": pulled.bytes, "unchanged": pulled.unchanged,
             "checkpoint": pulled.checkpoint}
        )  # fmt: skip
        return
    with_checkpoint = "" if pulled.checkpoint is None else f", {pulled.checkpoint} included"
    typer.echo(
        f"{pulled.path}: {pulled.files} file{'' if pulled.files == 1 else 's'}, {size(pulled.bytes)}{with_checkpoint} "
        f"(already here: {pulled.unchanged})"
    )


_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN_KEPT = 10


def clean(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help=f"{RUN_HELP} Default: all runs.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only runs without activity for this long: 30d, 12h, 2w.")
    ] = "30d",
    whole_runs: Annotated[
        bool,
        typer.Option("--runs", help="Also delete whole runs that are done or have no good checkpoint."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete. Without this option, only list what would be deleted.")
    ] = False,
    runs_dir: RunsDir = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Delete old checkpoints, and with --runs also old runs; without --yes only list them.

    Running and waiting runs and pinned checkpoints are kept, and without --runs each run's newest good checkpoint. With
    the profile of a cluster behind SSH, the runs on that cluster are cleaned.
    """
    from hpcaccel.core.run_dir import default_runs_dir
    from hpcaccel.submission import all_runs, find_run
    from hpcaccel.submission.runs.clean import plan_cleaning

    seconds = _age(older_than)
    chosen = [find_run(name, runs_dir=runs_dir) for name in runs] if runs else all_runs(runs_dir)
    folders = [] if runs else [default_runs_dir(runs_dir), *(run.path.parent.parent for run in chosen)]
    plan = plan_cleaning(chosen, older_than_seconds=seconds, whole_runs=whole_runs, folders=folders)
    done, failed = _delete_all(plan, yes=yes, verbose=not json)
    if json:
        print_json({**plan.to_json(), "deleted": yes, "failed": failed})
    else:
        _print_kept(plan)
        _print_sum(done, yes=yes)
    if failed:
        raise typer.Exit(1)


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text!r} is not an age: use a number and m, h, d or w, such as 30d")
    return float(int(match[1]) * _UNITS[match[2]])


def _delete_all(plan: Cleaning, *, yes: bool, verbose: bool) -> tuple[list[Item], list[str]]:
    """Delete the items of ``plan`` if ``yes`` is true. Returns the items that were deleted (or would be), and the error
    messages."""
    from hpcaccel.submission.runs.clean import Origins, delete

    done: list[Item] = []
    failed: list[str] = []
    origins = Origins()
    for item in plan.items:
        if yes:
            try:
                delete(item, origins=origins)
            except HpcaccelError as error:
                failed.append(str(error))
                if verbose:
                    note(f"error: {error}")
                continue
        done.append(item)
        if verbose:
            typer.echo(f"{'deleted' if yes else 'would delete'} {size(item.bytes):>9}  {item.path}  ({item.why})")
    return done, failed


def _print_kept(plan: Cleaning) -> None:
    from hpcaccel.core.formatting import clean as clean_text

    for run_id, why in plan.kept[:_SHOWN_KEPT]:
        note(f"kept {run_id}: {clean_text(why)}")
    if len(plan.kept) > _SHOWN_KEPT:
        note(f"kept {len(plan.kept)} runs in total")


def _print_sum(done: list[Item], *, yes: bool) -> None:
    count, together = len(done), size(sum(item.bytes for item in done))
    what = f"{count} {'item' if count == 1 else 'items'}, {together}" if count else "nothing"
    typer.echo(f"{'deleted' if yes else 'would delete'} {what}{'' if yes or not count else '; to delete, add --yes'}")
