"""``submit``: submits a spec file as a job, an array or several jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpcaccel.cli.follow import follow_to_the_end
from hpcaccel.cli.options import Cluster, Json, Key, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.remote_commands import given_options, submit_there
from hpcaccel.cli.remote.target_cluster import behind_ssh
from hpcaccel.cli.submit_checks import debug_overrides, refuse_what_slurm_refuses, show_changes
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission import Run, RunArray
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster
    from hpcaccel.submission.submit.prepare import PreparedSubmission

__all__ = ["submit"]

Grid = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=V1,V2", help="Submit an array with one task per combination of values; repeatable."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Start from a checkpoint of another run (its newest, or that of STEP), or from a checkpoint's path.",
        show_default=False,
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN",
        help="Start after another run has completed. Also afterany:RUN, afternotok:RUN. Repeatable.",
        show_default=False,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run until it ends; the exit code reports its result.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and submit nothing.")]
Diff = Annotated[bool, typer.Option("--diff", help="Show changes to spec and code since the last run with this name.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Run on one node for a short time, in the site's debug partition or QOS if known."),
]
Live = Annotated[bool, typer.Option("--live", help="First check whether Slurm would accept the job.")]
NoFacts = Annotated[
    bool,
    typer.Option(
        "--no-facts", help="Ignore the stored facts about the cluster, for example because they are outdated."
    ),
]


def submit(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    grid: Grid = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
    from_: From = None,
    after: After = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    diff: Diff = False,
    debug: Debug = False,
    live: Live = False,
    no_facts: NoFacts = False,
    json: Json = False,
    key: Key = None,
) -> None:
    """Submit a spec file as a job, or as an array with --grid."""
    given = {"--grid": grid, "--from": from_, "--wait": wait, "--diff": diff, "--debug": debug, "--live": live}
    for_one_job = [option for option, value in given.items() if value]
    if (there := behind_ssh(cluster)) is not None:
        _submit_there(
            context, there, file, overrides or [],
            grid=grid or [], runs_dir=runs_dir, wait=wait, dry_run=dry_run, debug=debug, facts=not no_facts, json=json,
            key=key, refused=for_one_job,
        )  # fmt: skip
    if _submit_several(
        file, overrides or [], cluster=cluster, runs_dir=runs_dir, after=after or [], dry_run=dry_run,
        facts=not no_facts, json=json, key=key, refused=for_one_job,
    ):  # fmt: skip
        return
    settings = debug_overrides(file, overrides or [], cluster) if debug else overrides or []
    run = _submit_one(
        file, settings, grid=grid, cluster=cluster, runs_dir=runs_dir, from_run=from_, after=after or [],
        dry_run=dry_run, diff=diff, live=live, facts=not no_facts, json=json, quiet=wait and json, key=key,
    )  # fmt: skip
    if wait and run is not None:
        follow_to_the_end(run.dir, json=json)


def _submit_one(
    file: Path,
    overrides: Sequence[str],
    *,
    grid: Sequence[str] | None,
    cluster: str | None,
    runs_dir: Path | None,
    from_run: str | None,
    after: Sequence[str],
    dry_run: bool,
    diff: bool,
    live: bool,
    facts: bool,
    json: bool,
    quiet: bool,
    key: str | None,
) -> Run | RunArray | None:
    """Submit a file with a single job. Returns None if nothing was submitted."""
    from hpcaccel.submission.runs.run_handle import open_run
    from hpcaccel.submission.submit.api import advice_afterwards, submit_prepared
    from hpcaccel.submission.submit.idempotent import once_or_always
    from hpcaccel.submission.submit.prepare import prepare

    with once_or_always(key) as once:
        if (earlier := once.earlier()) is not None:
            _print_submitted(open_run(earlier), json=json)  # type: ignore[arg-type]
            return None
        prepared = prepare(
            str(file), cluster=cluster, runs_dir=runs_dir, overrides=overrides, grid=grid or None, from_run=from_run,
            after=after, slurm=once.slurm, facts=facts,
        )  # fmt: skip
        for sentence in prepared.advice:
            note(f"note: {sentence}")
        if live:
            refuse_what_slurm_refuses(prepared)
        changes = show_changes(prepared, json=json) if diff else None
        if dry_run:
            _print_dry_run(prepared, json=json, changes=changes)
            return None
        run = submit_prepared(prepared, once=None if key is None else once)
    for sentence in advice_afterwards(prepared, run):
        note(f"note: {sentence}")
    if not quiet:
        _print_submitted(run, json=json, changes=changes)
    return run


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
    """Submit a file on the cluster. Options in `handled_here` are handled on this machine, others on the cluster."""
    from hpcaccel.spec.loading.overrides import grid_size
    from hpcaccel.spec.loading.workflow import read_jobs
    from hpcaccel.submission.remote.bundle import expanded_on

    handled_here = {"cluster", "runs_dir", "wait", "debug", "key"}
    with there:
        with expanded_on(there, file):
            several = read_jobs(file, overrides=overrides)
            if several is not None:
                _refuse_for_several(file, several, refused)
            settings = debug_overrides(file, overrides, there.name) if debug else overrides
        submit_there(
            there, file, settings, given_options(context, there, but=handled_here),
            runs_dir=runs_dir, is_sweep=False, several=several, wait=wait, dry_run=dry_run, json=json, facts=facts,
            tasks=grid_size(grid) if grid else None, key=key,
        )  # fmt: skip


def _print_submitted(run: Run | RunArray, *, json: bool, changes: dict[str, Any] | None = None) -> None:
    """Print the run id, the job id, the directory, and the commands that follow and cancel the run."""
    if json:
        branched = {} if run.record.branched_from is None else {"branched_from": run.record.branched_from}
        document = {"run_id": run.run_id, "name": run.name, "job_id": run.job_id, "path": str(run.path), **branched}
        print_json(document if changes is None else {**document, "changes": changes})
        return
    tasks = run.record.array_size
    count = "" if tasks is None else f" ({tasks} task{'' if tasks == 1 else 's'})"
    typer.echo(f"submitted {run.name}{count}")
    typer.echo(f"  run:        {run.run_id}")
    followers = run.record.links[1:]
    typer.echo(f"  job:        {run.job_id}{', followed by ' if followers else ''}{', '.join(followers)}")
    typer.echo(f"  directory:  {run.path}")
    if (origin := run.record.branched_from) is not None:
        typer.echo(f"  starts at:  step {origin['step']}, {origin['checkpoint']}")
    typer.echo(f"  follow it:  hpcaccel wait {run.run_id}")
    typer.echo(f"  output:     hpcaccel logs -f {run.run_id}{'' if tasks is None else '_0'}")
    typer.echo(f"  cancel it:  hpcaccel cancel {run.run_id}")


def _print_dry_run(prepared: PreparedSubmission, *, json: bool, changes: dict[str, Any] | None = None) -> None:
    tasks = [task.overrides for task in prepared.tasks] if prepared.is_array else []
    if json:
        document: dict[str, Any] = {
            "name": prepared.name,
            "cluster": prepared.cluster,
            "path": str(prepared.run.path),
            "tasks": tasks,
        }
        if prepared.origin is not None:
            document["branched_from"] = prepared.origin.to_json()
        if changes is not None:
            document["changes"] = changes
        print_json({**document, "script": prepared.script})
        return
    typer.echo(f"{prepared.name} can be submitted to {prepared.cluster}; nothing was submitted (--dry-run)")
    typer.echo(f"  directory:  {prepared.run.path}")
    if prepared.origin is not None:
        typer.echo(f"  starts at:  step {prepared.origin.step}, {prepared.origin.path}")
    for index, overrides in enumerate(tasks):
        typer.echo(f"  task {index}:     {' '.join(f'{key}={value}' for key, value in overrides.items())}")


# -- a file with several jobs -------------------------------------------------------------------------------------


def _submit_several(
    file: Path,
    overrides: Sequence[str],
    *,
    cluster: str | None,
    runs_dir: Path | None,
    after: Sequence[str],
    dry_run: bool,
    facts: bool,
    json: bool,
    key: str | None,
    refused: Sequence[str],
) -> bool:
    """Submit the jobs of a file with several jobs, and return True. For a file with a single job, return False at once.

    Args:
        refused: options that the user has given, but that apply to a single job only.
    """
    from hpcaccel.spec.loading.workflow import read_jobs

    jobs = read_jobs(file, overrides=overrides)
    if jobs is None:
        return False
    _refuse_for_several(file, jobs, refused)
    from hpcaccel.submission.submit.api import prepare_jobs, submit_jobs

    if dry_run:
        prepared = prepare_jobs(jobs, cluster=cluster, runs_dir=runs_dir, after=after, facts=facts)
        for sentence in dict.fromkeys(sentence for one in prepared for sentence in one.advice):
            note(f"note: {sentence}")
        scripts = [{"name": one.name, "path": str(one.run.path), "script": one.script} for one in prepared]
        _print_several(
            jobs,
            scripts,
            json=json,
            what=f"can be submitted to {prepared[0].cluster}; nothing was submitted (--dry-run)",
        )
        return True
    runs = submit_jobs(jobs, cluster=cluster, runs_dir=runs_dir, after=after, facts=facts, key=key)
    made = [{"name": run.name, "run_id": run.run_id, "job_id": run.job_id, "path": str(run.path)} for run in runs]
    _print_several(jobs, made, json=json, what="submitted")
    return True


def _refuse_for_several(file: Path, jobs: Sequence[JobSpec], options: Sequence[str]) -> None:
    """Raise UserError if the user has given ``options``, which apply to a single job only."""
    if options:
        raise UserError(f"not supported for a file with several jobs ({file} has {len(jobs)}): {', '.join(options)}")


def _print_several(jobs: Sequence[JobSpec], made: Sequence[dict[str, str]], *, json: bool, what: str) -> None:
    if json:
        print_json({"jobs": list(made)})
        return
    typer.echo(f"{len(jobs)} jobs {what}")
    for job, one in zip(jobs, made, strict=True):
        waits = f", after {', '.join(job.after)}" if job.after else ""
        typer.echo(f"  {one['name']}: {one.get('run_id') or one['path']}{waits}")
