"""``submit``: from a spec file to a job in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpcaccel.cli.options import Cluster, Json, Key, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.dispatch import behind_ssh
from hpcaccel.cli.submit_checks import debug_overrides, refuse_what_slurm_refuses, show_changes
from hpcaccel.cli.wait import follow_to_the_end
from hpcaccel.cli.workflow import refuse_for_several, submit_several

if TYPE_CHECKING:
    from hpcaccel.submission import Run, RunArray
    from hpcaccel.submission.prepare import Prepared
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = ["submit"]


def submit(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="An array with one task a combination; may be given again."),
    ] = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Start from a checkpoint of another run (its newest, or that of a step), or from a checkpoint's path.",
            show_default=False,
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Wait for the good end of another run; afterany:RUN, afternotok:RUN. May be given again.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; its result is the exit code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and submit nothing.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what has changed, spec and code, since the last run of that name.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="One node, a short time, the site's partition or QOS for debugging.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="Ask Slurm first whether it would take it.")] = False,
    no_facts: Annotated[
        bool, typer.Option("--no-facts", help="Leave the stored facts of the cluster aside; they may be old.")
    ] = False,
    json: Json = False,
    key: Key = None,
) -> None:
    """Submit a spec file as a job, or as an array with --grid."""
    from hpcaccel.submission.idempotent import once_or_always
    from hpcaccel.submission.prepare import prepare
    from hpcaccel.submission.run_handle import open_run
    from hpcaccel.submission.submit import advice_afterwards, submit_prepared

    given = {"--grid": grid, "--from": from_, "--wait": wait, "--diff": diff, "--debug": debug, "--live": live}
    for_one_job = [option for option, value in given.items() if value]
    if (there := behind_ssh(cluster)) is not None:
        _submit_there(
            context, there, file, overrides or [],
            grid=grid or [], runs_dir=runs_dir, wait=wait, dry_run=dry_run, debug=debug, facts=not no_facts, json=json,
            key=key, refused=for_one_job,
        )  # fmt: skip
    if submit_several(
        file, overrides or [], cluster=cluster, runs_dir=runs_dir, after=after or [], dry_run=dry_run,
        facts=not no_facts, json=json, key=key, refused=for_one_job,
    ):  # fmt: skip
        return
    settings = debug_overrides(file, overrides or [], cluster) if debug else overrides or []
    with once_or_always(key) as once:
        if (earlier := once.earlier()) is not None:
            _tell_what_is(open_run(earlier), json=json)  # type: ignore[arg-type]
            return
        prepared = prepare(
            str(file),
            cluster=cluster,
            runs_dir=runs_dir,
            overrides=settings,
            grid=grid or None,
            from_run=from_,
            after=after or [],
            slurm=once.slurm,
            facts=not no_facts,
        )
        for sentence in prepared.advice:
            note(f"note: {sentence}")
        if live:
            refuse_what_slurm_refuses(prepared)
        changes = show_changes(prepared, json=json) if diff else None
        if dry_run:
            _tell_what_would_be(prepared, json=json, changes=changes)
            return
        run = submit_prepared(prepared, once=None if key is None else once)
    for sentence in advice_afterwards(prepared, run):
        note(f"note: {sentence}")
    if not (wait and json):  # a program that waits reads one document: the end
        _tell_what_is(run, json=json, changes=changes)
    if wait:
        follow_to_the_end(run.dir, json=json)


def _submit_there(
    context: typer.Context,
    there: RemoteCluster,
    file: Path,
    overrides: Sequence[str],
    *,
    grid: Sequence[str],
    runs_dir: Path | None,
    wait: bool,
    dry_run: bool,
    debug: bool,
    facts: bool,
    json: bool,
    key: str | None,
    refused: Sequence[str],
) -> NoReturn:
    """Each option is seen to here (`seen_to`), or goes to the same command on the cluster as it was given."""
    from hpcaccel.cli.remote.run_commands import submit_there
    from hpcaccel.cli.remote.spec_commands import given_options
    from hpcaccel.spec.grid import grid_size
    from hpcaccel.spec.workflow import read_jobs
    from hpcaccel.submission.remote.local_env import meant_for

    seen_to = {"cluster", "runs_dir", "wait", "debug", "key"}
    with there:
        with meant_for(there, file):
            several = read_jobs(file, overrides=overrides)
            if several is not None:
                refuse_for_several(file, several, refused)
            settings = debug_overrides(file, overrides, there.name) if debug else overrides
        submit_there(
            there, file, settings, given_options(context, there, but=seen_to),
            runs_dir=runs_dir, is_sweep=False, several=several, wait=wait, dry_run=dry_run, json=json, facts=facts,
            tasks=grid_size(grid) if grid else None, key=key,
        )  # fmt: skip


def _tell_what_is(run: Run | RunArray, *, json: bool, changes: dict[str, Any] | None = None) -> None:
    """The run id, the job id, the directory, and the commands that follow the run and cancel it."""
    if json:
        branched = {} if run.record.branched_from is None else {"branched_from": run.record.branched_from}
        said = {"run_id": run.run_id, "name": run.name, "job_id": run.job_id, "path": str(run.path), **branched}
        print_json(said if changes is None else {**said, "changes": changes})
        return
    tasks = run.record.array_size
    typer.echo(f"submitted {run.name}{'' if tasks is None else f' ({tasks} tasks)'}")
    typer.echo(f"  run:        {run.run_id}")
    followers = run.record.links[1:]
    typer.echo(f"  job:        {run.job_id}{', followed by ' if followers else ''}{', '.join(followers)}")
    typer.echo(f"  directory:  {run.path}")
    if (origin := run.record.branched_from) is not None:
        typer.echo(f"  starts at:  step {origin['step']}, {origin['checkpoint']}")
    typer.echo(f"  follow it:  hpcaccel wait {run.run_id}")
    typer.echo(f"  read it:    hpcaccel logs -f {run.run_id}{'' if tasks is None else '_0'}")
    typer.echo(f"  cancel it:  hpcaccel cancel {run.run_id}")


def _tell_what_would_be(prepared: Prepared, *, json: bool, changes: dict[str, Any] | None = None) -> None:
    tasks = [task.overrides for task in prepared.tasks] if prepared.is_array else []
    if json:
        said: dict[str, Any] = {
            "name": prepared.name,
            "cluster": prepared.cluster,
            "path": str(prepared.run.path),
            "tasks": tasks,
        }
        if prepared.origin is not None:
            said["branched_from"] = prepared.origin.to_json()
        if changes is not None:
            said["changes"] = changes
        print_json({**said, "script": prepared.script})
        return
    typer.echo(f"{prepared.name} can be submitted to {prepared.cluster}; nothing was (--dry-run)")
    typer.echo(f"  directory:  {prepared.run.path}")
    if prepared.origin is not None:
        typer.echo(f"  starts at:  step {prepared.origin.step}, {prepared.origin.path}")
    for index, overrides in enumerate(tasks):
        typer.echo(f"  task {index}:     {' '.join(f'{key}={value}' for key, value in overrides.items())}")
