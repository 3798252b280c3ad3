"""What the commands of sweeps say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

from hpcaccel.cli.output import note, print_json

if TYPE_CHECKING:
    from hpcaccel.sweeps.arrays import WorkerArrays
    from hpcaccel.sweeps.dry_run import Foresight
    from hpcaccel.sweeps.retry import Again
    from hpcaccel.sweeps.sweep_handle import Sweep
    from hpcaccel.sweeps.sweep_overview import SweepOverview
    from hpcaccel.view.listing import Listed
    from hpcaccel.view.run_overview import Overview

__all__ = [
    "show",
    "tell_of_again",
    "tell_of_age",
    "tell_what_goes_on",
    "tell_what_is",
    "tell_what_would_be",
    "wait_for_the_end",
]


def tell_what_is(sweep: Sweep, arrays: WorkerArrays, *, json: bool) -> None:
    _tell_of_missing_workers(arrays)
    if json:
        print_json({**_identity(sweep), "job_ids": arrays.array_ids, "workers": len(arrays.jobs)})
        return
    typer.echo(f"started {sweep.name}: {_workers(arrays)}")
    typer.echo(f"  sweep:      {sweep.run_id}")
    typer.echo(f"  job:        {', '.join(arrays.array_ids)}")
    typer.echo(f"  directory:  {sweep.path}")
    typer.echo(f"  look at it: hpcaccel sweep status {sweep.run_id}")
    typer.echo(f"  the trials: hpcaccel sweep table {sweep.run_id}")
    typer.echo(f"  stop it:    hpcaccel sweep stop {sweep.run_id}")


def _identity(sweep: Sweep) -> dict[str, str]:
    return {"run_id": sweep.run_id, "name": sweep.name, "path": str(sweep.path)}


def _workers(arrays: WorkerArrays) -> str:
    return f"{len(arrays.jobs)} worker{'s' if len(arrays.jobs) > 1 else ''}"


def _tell_of_missing_workers(arrays: WorkerArrays) -> None:
    if arrays.refusal:
        note(
            f"note: {len(arrays.jobs)} of {len(arrays.indices)} workers were started: Slurm takes no more jobs of "
            f"yours ({arrays.refusal}). The sweep takes longer, and tries the same number of trials"
        )


def tell_what_would_be(told: Foresight, *, json: bool) -> None:
    if json:
        print_json(told.to_json())
        return
    typer.echo(f"{told.name} can be started on {told.cluster}; nothing was (--dry-run)")
    typer.echo(f"  directory:  {told.path}")
    points = "points without end" if told.space is None else f"{told.space:,} points"
    most = "until max_gpu_hours are used up" if told.trials is None else f"{told.trials:,} at most"
    typer.echo(f"  trials:     {most}, {told.method} over {points}")
    for number, point in enumerate(told.first_points):
        values = " ".join(f"{path}={value}" for path, value in point.items())
        typer.echo(f"    {number}: {values}")
    if told.trials is None or len(told.first_points) < told.trials:
        typer.echo("    …")
    arrays = " + ".join(f"0-{size - 1}" for size in told.arrays)
    what = f"GPUs: {told.gpus_per_worker}" if told.gpus_per_worker else f"ranks, without GPUs: {told.ranks_per_worker}"
    typer.echo(f"  workers:    {told.workers} (array {arrays}); each has {what}")
    stay = "without a time limit" if told.gpu_hours_per_stay is None else f"{told.gpu_hours_per_stay:.3g} at most"
    typer.echo(f"  GPU-hours:  {stay}, until all workers have come to their time limit; then they come back")
    limit = "no limit (max_gpu_hours)" if told.max_gpu_hours is None else f"{told.max_gpu_hours:g} (max_gpu_hours)"
    typer.echo(f"              in all: {limit}")
    typer.echo(f"  files:      {', '.join(told.files)}")


def tell_what_goes_on(sweep: Sweep, arrays: WorkerArrays, *, json: bool) -> None:
    """After a resume."""
    _tell_of_missing_workers(arrays)
    if json:
        print_json({**_identity(sweep), "job_ids": arrays.array_ids, "workers": len(arrays.jobs)})
        return
    typer.echo(f"{sweep.run_id} goes on with {_workers(arrays)} as job {', '.join(arrays.array_ids)}")


def tell_of_again(sweep: Sweep, queued: list[Again], arrays: WorkerArrays | None, *, json: bool) -> None:
    if arrays is not None:
        _tell_of_missing_workers(arrays)
    if json:
        trials = [{"trial": one.trial, "checkpoint_step": one.checkpoint_step} for one in queued]
        print_json({**_identity(sweep), "trials": trials, "job_ids": [] if arrays is None else arrays.array_ids})
        return
    for one in queued:
        what = "begins anew" if one.checkpoint_step is None else f"goes on from step {one.checkpoint_step}"
        typer.echo(f"trial {one.trial} {what}, as a trial of its own")
    who = (
        "the workers take them next"
        if arrays is None
        else f"{_workers(arrays)} started as {', '.join(arrays.array_ids)}"
    )
    typer.echo(f"{len(queued)} trial{'s wait' if len(queued) > 1 else ' waits'}; {who}")


def tell_of_age(shown: Sequence[Overview | Listed | SweepOverview]) -> None:
    """Slurm that does not answer is no error, and what it said before is not what it would say now."""
    from hpcaccel.view.formatting import ago

    old = [run for run in shown if run.note]
    if old:
        asked = min((run.asked for run in old if run.asked is not None), default=None)
        said = "it has said nothing yet" if asked is None else f"what it said {ago(asked)} is shown"
        note(f"note: {old[0].note}; {said}")


def show(sweep: Sweep, *, json: bool) -> None:
    """Print the status of a sweep."""
    now = sweep.status()
    if json:
        print_json(now.to_json())
        return
    from hpcaccel.view.sweep_tables import print_sweep

    print_sweep(now)
    tell_of_age([now])


def wait_for_the_end(sweep: Sweep, *, json: bool) -> NoReturn:
    """Say how a sweep goes until nothing follows by itself, and leave with its result.

    Raises:
        typer.Exit: with 0 completed, 1 failed, 85 paused, 130 cancelled (or Ctrl-C here, which leaves the sweep alone).
    """
    from hpcaccel.view.sweep_tables import sweep_in_a_line

    try:
        for now in sweep.follow():
            if not json:
                note(sweep_in_a_line(now))
    except KeyboardInterrupt:
        note(f"\nthe sweep goes on. Look at it: hpcaccel sweep status {sweep.run_id}")
        raise typer.Exit(130) from None
    show(sweep, json=json)
    raise typer.Exit(now.exit_code)
