"""``sweep``: start, show and steer sweeps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import RUN_HELP, Cluster, Json, Key, Overrides, RunsDir, SpecFile, WholeSummaries
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.forward import Secret, there_or_here
from hpcaccel.cli.remote.remote_commands import fetch_file_there, given_options, submit_there
from hpcaccel.cli.remote.target_cluster import behind_ssh, cluster_of_run
from hpcaccel.cli.run_names import complete_sweep
from hpcaccel.cli.sweep_messages import (
    follow_sweep,
    print_continued,
    print_dry_run,
    print_resumed,
    print_started,
    show_sweep,
)

if TYPE_CHECKING:
    from hpcaccel.sweeps.sweep_handle import Sweep

__all__ = ["app"]

app = typer.Typer(
    cls=WholeSummaries,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_there_or_here = functools.partial(there_or_here, app, "sweep")

SweepName = Annotated[
    str, typer.Argument(metavar="SWEEP", help=RUN_HELP, show_default=False, autocompletion=complete_sweep)
]


def _find(name: str) -> Sweep:
    from hpcaccel.sweeps.sweep_handle import find_sweep

    return find_sweep(name)


# -- starting ---------------------------------------------------------------------------------------------------------


@app.command()
def start(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the sweep; the exit code reports its result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and start nothing.")] = False,
    json: Json = False,
    key: Key = None,
) -> None:
    """Start a sweep: an array of workers, each of which runs one trial after another."""
    from hpcaccel.submission.submit.idempotent import once_or_always
    from hpcaccel.sweeps.start_sweep import advice_afterwards, foresee, prepare_sweep, start_sweep
    from hpcaccel.sweeps.sweep_handle import Sweep

    if (there := behind_ssh(cluster)) is not None:
        handled_here = {"cluster", "runs_dir", "wait", "key"}
        submit_there(
            there, file, overrides or [], given_options(context, there, but=handled_here),
            runs_dir=runs_dir, is_sweep=True, wait=wait, dry_run=dry_run, json=json, key=key,
        )  # fmt: skip
    with once_or_always(key) as once:
        if (earlier := once.earlier()) is not None:
            show_sweep(Sweep(earlier), json=json)
            return
        plan = prepare_sweep(str(file), cluster=cluster, runs_dir=runs_dir, overrides=overrides or [], slurm=once.slurm)
        for sentence in plan.advice:
            note(f"note: {sentence}")
        if dry_run:
            print_dry_run(foresee(plan), json=json)
            return
        directory, arrays = start_sweep(plan, once=None if key is None else once)
    for sentence in advice_afterwards(plan, arrays):
        note(f"note: {sentence}")
    sweep = Sweep(directory.path)
    if not (wait and json):  # with --wait --json, only the final status is printed
        print_started(sweep, arrays, json=json)
    if wait:
        follow_sweep(sweep, json=json)


# -- showing ----------------------------------------------------------------------------------------------------------


@_there_or_here("status", effect="reads")
def status(sweep: SweepName, json: Json = False) -> None:
    """Show the trials, the best one, the workers and the cost."""
    show_sweep(_find(sweep), json=json)


@_there_or_here("table", effect="reads")
def table(
    sweep: SweepName,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print comma-separated values; the default if the output is not a terminal.")
    ] = False,
    json: Json = False,
) -> None:
    """List all trials; as CSV if the output is a file or a pipe.

    State, metrics, parameters, steps, cost, worker, attempts. A narrow terminal shows fewer columns, but
    always state and metrics.
    """
    from hpcaccel.sweeps.results import parameters, to_csv, to_json
    from hpcaccel.view.text_tables import has_a_terminal

    found = _find(sweep)
    rows = found.table()
    if json:
        typer.echo(to_json(rows), nl=False)
    elif csv or not has_a_terminal():
        typer.echo(to_csv(rows), nl=False)
    else:
        from hpcaccel.view.sweep_tables import print_trials

        left_out = print_trials(rows, params=parameters(rows, found.goal))
        if left_out:
            note(f"note: the terminal is too narrow for {', '.join(left_out)}; --csv prints all columns")


@_there_or_here("best", effect="reads")
def best(
    sweep: SweepName,
    trial: Annotated[
        int | None, typer.Option(metavar="N", help="Print this trial instead of the best one.", show_default=False)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Metric by which the best trial is chosen, if the sweep has several.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the best trial as a spec file.

    To submit it: hpcaccel sweep best SWEEP > best.yaml; hpcaccel submit best.yaml
    """
    found = _find(sweep).best(trial=trial, metric=metric)
    if json:
        spec = found.spec.model_dump(mode="json")
        values = {"trial": found.trial, "values": found.values, "params": found.params, "path": str(found.path)}
        print_json({**values, "spec": spec})
        return
    typer.echo(found.to_yaml(), nl=False)


@app.command()
def plot(
    sweep: SweepName,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write: .html, .png, .svg or .pdf.")
    ] = Path("sweep.html"),
) -> None:
    """Plot a sweep to a file.

    Parallel coordinates, history, learning curves, rungs, importances.
    """
    if (found := cluster_of_run(sweep, only_sweeps=True)) is not None:
        fetch_file_there(found[0], ["sweep", "plot", found[1]], out)
    from hpcaccel.view.sweep_plot import write_plot

    typer.echo(str(write_plot(_find(sweep), out)))


@app.command()
def export(
    sweep: SweepName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The SQLite file to write.")] = Path(
        "study.db"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Copy all trials to an SQLite file for Optuna and optuna-dashboard.

    The sweep may be running; the copy has the trials so far. The sweep itself is only read.
    """
    from hpcaccel.sweeps.study_export import check_target

    if (there := cluster_of_run(sweep, only_sweeps=True)) is not None:
        options = ["--force"] if force else []
        fetch_file_there(there[0], ["sweep", "export", there[1], *options], check_target(out, force=force))
    found = _find(sweep)
    path, count = found.export(out, force=force)
    typer.echo(str(path))
    note(f"{count} trials, study {found.name!r}; look at them: optuna-dashboard sqlite:///{path}")


# -- steering ---------------------------------------------------------------------------------------------------------


@_there_or_here("stop")
def stop(sweep: SweepName) -> None:
    """Stop the trials after a save; `sweep resume` continues them."""
    found = _find(sweep)
    found.stop()
    typer.echo(
        f"stop requested for {found.run_id}: its trials save and exit; continue with hpcaccel sweep resume "
        f"{found.run_id}"
    )


@_there_or_here(
    "resume",
    not_there={"file": "--file is a file on this machine; give the changes as KEY=VALUE (sweep.max_trials=200)"},
)
def resume(
    sweep: SweepName,
    overrides: Overrides = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The sweep's spec file, with changes.", show_default=False)
    ] = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Resume a sweep with the same trials.

    No worker may be running. An override such as sweep.max_trials=200 allows more trials.
    """
    found = _find(sweep)
    arrays = found.resume(changes=overrides or [], file=None if file is None else str(file))
    print_resumed(found, arrays, json=json)


@_there_or_here("retry-failed")
def retry_failed(sweep: SweepName, secret: Secret = None, json: Json = False) -> None:
    """Run the failed trials again."""
    found = _find(sweep)
    print_continued(found, *found.retry_failed(), json=json)


@_there_or_here("extend")
def extend(
    sweep: SweepName,
    top: Annotated[
        int, typer.Option(metavar="K", min=1, help="Number of best trials to continue; repeats of a point count once.")
    ],
    overrides: Overrides = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Continue the best trials from their checkpoints, with new values such as args.epochs=20.

    Without new values, only pruned trials are continued.
    """
    found = _find(sweep)
    print_continued(found, *found.extend(top, settings=overrides or []), json=json)


@_there_or_here("throttle")
def throttle(
    sweep: SweepName,
    most: Annotated[int, typer.Argument(metavar="N", help="Maximum number of workers.", min=1)],
) -> None:
    """Let at most N workers run at a time.

    Workers that are already running continue until they are requeued.
    """
    found = _find(sweep)
    found.throttle(most)
    typer.echo(f"{found.run_id}: the limit on workers running at a time is now {most}")
