"""``sweep``: many trials of one job, started, looked at and steered."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.completion import sweep_names
from hpcaccel.cli.options import RUN_HELP, Cluster, Json, Key, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.dispatch import behind_ssh, behind_ssh_run
from hpcaccel.cli.remote.forward import there_or_here
from hpcaccel.cli.remote.forwarded_secrets import Secret
from hpcaccel.cli.root_help import WholeSummaries
from hpcaccel.cli.sweep_messages import (
    show,
    tell_of_again,
    tell_what_goes_on,
    tell_what_is,
    tell_what_would_be,
    wait_for_the_end,
)

if TYPE_CHECKING:
    from hpcaccel.sweeps.sweep_handle import Sweep

__all__ = ["app"]

app = typer.Typer(
    cls=WholeSummaries,
    help="Search hyperparameters: many trials of one job on an array of workers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_there_or_here = functools.partial(there_or_here, app, "sweep")

SweepName = Annotated[
    str, typer.Argument(metavar="SWEEP", help=RUN_HELP, show_default=False, autocompletion=sweep_names)
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
    wait: Annotated[bool, typer.Option("--wait", help="Follow the sweep; its result is the exit code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and start nothing.")] = False,
    json: Json = False,
    key: Key = None,
) -> None:
    """Start a sweep: workers that run trial after trial."""
    from hpcaccel.submission.idempotent import once_or_always
    from hpcaccel.sweeps.dry_run import foresee
    from hpcaccel.sweeps.start_sweep import advice_afterwards, prepare_sweep, start_sweep
    from hpcaccel.sweeps.sweep_handle import Sweep

    if (there := behind_ssh(cluster)) is not None:
        from hpcaccel.cli.remote.run_commands import submit_there
        from hpcaccel.cli.remote.spec_commands import given_options

        seen_to = {"cluster", "runs_dir", "wait", "key"}
        submit_there(
            there, file, overrides or [], given_options(context, there, but=seen_to),
            runs_dir=runs_dir, is_sweep=True, wait=wait, dry_run=dry_run, json=json, key=key,
        )  # fmt: skip
    with once_or_always(key) as once:
        if (earlier := once.earlier()) is not None:
            show(Sweep(earlier), json=json)
            return
        plan = prepare_sweep(str(file), cluster=cluster, runs_dir=runs_dir, overrides=overrides or [], slurm=once.slurm)
        for sentence in plan.advice:
            note(f"note: {sentence}")
        if dry_run:
            tell_what_would_be(foresee(plan), json=json)
            return
        directory, arrays = start_sweep(plan, once=None if key is None else once)
    for sentence in advice_afterwards(plan, arrays):
        note(f"note: {sentence}")
    sweep = Sweep(directory.path)
    if not (wait and json):  # a program that waits reads one document: the end
        tell_what_is(sweep, arrays, json=json)
    if wait:
        wait_for_the_end(sweep, json=json)


# -- looking ----------------------------------------------------------------------------------------------------------


@_there_or_here("status", effect="reads")
def status(sweep: SweepName, json: Json = False) -> None:
    """Show trials, the best one, workers, cost."""
    show(_find(sweep), json=json)


@_there_or_here("table", effect="reads")
def table(
    sweep: SweepName,
    csv: Annotated[
        bool, typer.Option("--csv", help="Comma-separated values, as where the output is no terminal.")
    ] = False,
    json: Json = False,
) -> None:
    """List all trials; CSV into a file or a pipe.

    State, metrics, parameters, steps, cost, worker, attempts. A narrow terminal has no room for all columns: state
    and metrics are always there.
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
    trial: Annotated[int | None, typer.Option(metavar="N", help="This trial instead.", show_default=False)] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of several metrics, the one that decides.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Print the best trial as a spec file.

    For submit: hpcaccel sweep best SWEEP > best.yaml; hpcaccel submit best.yaml
    """
    found = _find(sweep).best(trial=trial, metric=metric)
    if json:
        spec = found.spec.model_dump(mode="json")
        said = {"trial": found.trial, "values": found.values, "params": found.params, "path": str(found.path)}
        print_json({**said, "spec": spec})
        return
    typer.echo(found.to_yaml(), nl=False)


@app.command()
def plot(
    sweep: SweepName,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="Where it is written: .html, .png, .svg or .pdf.")
    ] = Path("sweep.html"),
) -> None:
    """Draw a sweep into one file.

    Parallel coordinates, history, learning curves, rungs, importances.
    """
    if (found := behind_ssh_run(sweep, only_sweeps=True)) is not None:
        from hpcaccel.cli.remote.run_commands import plot_there

        plot_there(*found, out)
    from hpcaccel.view.sweep_plot import write_plot

    typer.echo(str(write_plot(_find(sweep), out)))


# -- steering ---------------------------------------------------------------------------------------------------------


@_there_or_here("stop")
def stop(sweep: SweepName) -> None:
    """Let trials save and leave; resume goes on."""
    found = _find(sweep)
    found.stop()
    typer.echo(
        f"asked {found.run_id} to stop: its trials save and leave; go on with hpcaccel sweep resume {found.run_id}"
    )


@_there_or_here(
    "resume",
    not_there={"file": "--file is a file of this machine: give what has changed as KEY=VALUE (sweep.max_trials=200)"},
)
def resume(
    sweep: SweepName,
    overrides: Overrides = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The sweep's spec file once more.", show_default=False)
    ] = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Go on with the same trials.

    No worker may be left. With sweep.max_trials=200 and the like there is more to do.
    """
    found = _find(sweep)
    arrays = found.resume(changes=overrides or [], file=None if file is None else str(file))
    tell_what_goes_on(found, arrays, json=json)


@_there_or_here("retry-failed")
def retry_failed(sweep: SweepName, secret: Secret = None, json: Json = False) -> None:
    """Run the trials that failed once more."""
    found = _find(sweep)
    tell_of_again(found, *found.retry_failed(), json=json)


@_there_or_here("extend")
def extend(
    sweep: SweepName,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="So many of the best trials.")],
    overrides: Overrides = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Let the best trials go on with more to do.

    Such as args.epochs=20, from their checkpoints. Without any value, those that were ended early go on.
    """
    found = _find(sweep)
    tell_of_again(found, *found.extend(top, settings=overrides or []), json=json)


@_there_or_here("throttle")
def throttle(
    sweep: SweepName, most: Annotated[int, typer.Argument(metavar="N", help="So many workers at a time.", min=1)]
) -> None:
    """Let at most N workers run at a time.

    Those that run already go on until they come back through the queue.
    """
    found = _find(sweep)
    found.throttle(most)
    typer.echo(f"{found.run_id}: at most {most} workers run at a time")
