"""Messages of the sweep commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

from hpcaccel.cli.output import EXIT_INTERRUPTED, note, print_json

if TYPE_CHECKING:
    from hpcaccel.sweeps.retry import ContinuedTrial
    from hpcaccel.sweeps.start_sweep import DryRun
    from hpcaccel.sweeps.sweep_handle import Sweep
    from hpcaccel.sweeps.sweep_overview import SweepOverview
    from hpcaccel.sweeps.worker_jobs import WorkerArrays
    from hpcaccel.view.run_overview import Overview, RunRow

__all__ = [
    "follow_sweep",
    "note_outdated",
    "print_continued",
    "print_dry_run",
    "print_resumed",
    "print_started",
    "show_sweep",
]


def print_started(sweep: Sweep, arrays: WorkerArrays, *, json: bool) -> None:
    """Print the message after ``sweep start``."""
    _note_missing_workers(arrays)
    if json:
        print_json({**_identity(sweep), "job_ids": arrays.array_ids, "workers": len(arrays.jobs)})
        return
    typer.echo(f"started {sweep.name}: {_workers(arrays)}")
    typer.echo(f"  sweep:      {sweep.run_id}")
    typer.echo(f"  job:        {', '.join(arrays.array_ids)}")
    typer.echo(f"  directory:  {sweep.path}")
    typer.echo(f"  status:     hpcaccel sweep status {sweep.run_id}")
    typer.echo(f"  trials:     hpcaccel sweep table {sweep.run_id}")
    typer.echo(f"  stop it:    hpcaccel sweep stop {sweep.run_id}")


def _identity(sweep: Sweep) -> dict[str, str]:
    return {"run_id": sweep.run_id, "name": sweep.name, "path": str(sweep.path)}


def _workers(arrays: WorkerArrays) -> str:
    return _count(len(arrays.jobs), "worker")


def _jobs(arrays: WorkerArrays) -> str:
    return f"job{'s' * (len(arrays.array_ids) > 1)} {', '.join(arrays.array_ids)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _note_missing_workers(arrays: WorkerArrays) -> None:
    if arrays.refusal:
        note(
            f"note: only {len(arrays.jobs)} of {len(arrays.indices)} workers started: Slurm accepts no more jobs "
            f"from you ({arrays.refusal}). The sweep runs the same number of trials, but takes longer"
        )


def print_dry_run(plan: DryRun, *, json: bool) -> None:
    """Print the message after ``sweep start --dry-run``."""
    if json:
        print_json(plan.to_json())
        return
    typer.echo(f"{plan.name} can be started on {plan.cluster}; nothing was started (--dry-run)")
    typer.echo(f"  directory:  {plan.path}")
    points = "an infinite number of points" if plan.space is None else f"{plan.space:,} point{'s' * (plan.space != 1)}"
    most = "until max_gpu_hours are used up" if plan.trials is None else f"at most {plan.trials:,}"
    typer.echo(f"  trials:     {most}, {plan.method} over {points}")
    for number, point in enumerate(plan.first_points):
        values = " ".join(f"{path}={value}" for path, value in point.items())
        typer.echo(f"    {number}: {values}")
    if plan.trials is None or len(plan.first_points) < plan.trials:
        typer.echo("    …")
    arrays = " + ".join(f"0-{size - 1}" for size in plan.arrays)
    gpus, ranks = _count(plan.gpus_per_worker, "GPU"), _count(plan.ranks_per_worker, "rank")
    what = gpus if plan.gpus_per_worker else f"{ranks}, no GPUs"
    typer.echo(f"  workers:    {plan.workers} (array {arrays}); each has {what}")
    if plan.gpu_hours_per_stay is None:
        typer.echo("  GPU-hours:  unlimited (the job has no time limit)")
    else:
        hours = f"{plan.gpu_hours_per_stay:.3g}"
        typer.echo(f"  GPU-hours:  at most {hours} until all workers reach their time limit; then they are requeued")
    given = plan.max_gpu_hours
    limit = "no limit (max_gpu_hours is not set)" if given is None else f"{given:g} (max_gpu_hours)"
    typer.echo(f"              in total: {limit}")
    typer.echo(f"  files:      {', '.join(plan.files)}")


def print_resumed(sweep: Sweep, arrays: WorkerArrays, *, json: bool) -> None:
    """Print the message after ``sweep resume``."""
    _note_missing_workers(arrays)
    if json:
        print_json({**_identity(sweep), "job_ids": arrays.array_ids, "workers": len(arrays.jobs)})
        return
    typer.echo(f"{sweep.run_id} continues with {_workers(arrays)} as {_jobs(arrays)}")


def print_continued(sweep: Sweep, queued: list[ContinuedTrial], arrays: WorkerArrays | None, *, json: bool) -> None:
    """Print the message after ``sweep retry-failed`` and ``sweep extend``."""
    if arrays is not None:
        _note_missing_workers(arrays)
    if json:
        trials = [{"trial": one.trial, "checkpoint_step": one.checkpoint_step} for one in queued]
        print_json({**_identity(sweep), "trials": trials, "job_ids": [] if arrays is None else arrays.array_ids})
        return
    for one in queued:
        what = "starts again" if one.checkpoint_step is None else f"continues from step {one.checkpoint_step}"
        typer.echo(f"trial {one.trial} {what}, as a new trial")
    who = (
        "the running workers will process the queue"
        if arrays is None
        else f"{_workers(arrays)} started as {_jobs(arrays)}"
    )
    typer.echo(f"{_count(len(queued), 'trial')} queued; {who}")


def note_outdated(shown: Sequence[Overview | RunRow | SweepOverview]) -> None:
    """If Slurm does not respond, print a note with the age of the states shown."""
    from hpcaccel.core.formatting import ago

    old = [run for run in shown if run.note]
    if old:
        asked = min((run.asked for run in old if run.asked is not None), default=None)
        age = "there is no earlier status to show" if asked is None else f"the states shown are from {ago(asked)}"
        note(f"note: {old[0].note}; {age}")


def show_sweep(sweep: Sweep, *, json: bool) -> None:
    """Print the status of a sweep."""
    now = sweep.status()
    if now.ended:
        from hpcaccel.submission.runs.overdue_notices import send_overdue_notices

        send_overdue_notices(sweep.dir, now)
    if json:
        print_json(now.to_json())
        return
    from hpcaccel.view.sweep_tables import print_sweep

    print_sweep(now)
    note_outdated([now])


def follow_sweep(sweep: Sweep, *, json: bool) -> NoReturn:
    """Show the progress of a sweep until it ends or pauses, then print its status, and exit.

    Raises:
        typer.Exit: always. The exit code is 0 if the sweep completed, 1 if it failed or was lost, 85 if it paused, 130
            if it was cancelled. After Ctrl-C the exit code is also 130, and the sweep continues.
    """
    from hpcaccel.view.sweep_tables import sweep_in_a_line

    try:
        for now in sweep.follow():
            if not json:
                note(sweep_in_a_line(now))
    except KeyboardInterrupt:
        note(f"\nthe sweep continues. Show its status: hpcaccel sweep status {sweep.run_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    show_sweep(sweep, json=json)
    raise typer.Exit(now.exit_code)
