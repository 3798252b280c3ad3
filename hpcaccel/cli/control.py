"""``stop``, ``resume``, ``cancel``: steering a run from outside."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from hpcaccel.cli.options import Json, RunName
from hpcaccel.cli.output import print_json
from hpcaccel.cli.remote.forwarded_secrets import Secret
from hpcaccel.cli.run_lookup import as_sweep, find
from hpcaccel.cli.sweep_messages import tell_what_goes_on
from hpcaccel.errors import UserError

__all__ = ["cancel", "resume", "stop"]


def stop(
    run: RunName,
    requeue: Annotated[bool, typer.Option("--requeue", help="Save, leave, and come back through the queue.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Leave the training loop for good and run the code behind it.")
    ] = False,
) -> None:
    """Ask a run to save and stop; `resume` goes on from there.

    The ranks agree on one step, save a checkpoint and leave. Without an option the run is then paused.
    """
    if requeue and finish:
        raise UserError("--requeue and --finish exclude each other: a run either comes back or is done")
    found = find(run)
    then: Literal["requeue", "finish", "pause"] = "requeue" if requeue else "finish" if finish else "pause"
    found.stop(then=then)
    typer.echo(f"asked {found.run_id} to stop: {_FOLLOWS[then].format(run=found.run_id)}")


def resume(run: RunName, secret: Secret = None, json: Json = False) -> None:
    """Go on with a run that was stopped or has failed, from its newest checkpoint."""
    found = find(run)
    if (sweep := as_sweep(found)) is not None:
        tell_what_goes_on(sweep, sweep.resume(), json=json)
        return
    found.resume()
    job_id = found.job_id
    if json:
        print_json({"run_id": found.run_id, "job_id": job_id, "path": str(found.path)})
    else:
        typer.echo(f"{found.run_id} goes on as job {job_id}; follow it: hpcaccel wait {found.run_id}")


def cancel(run: RunName) -> None:
    """End a run now. Nothing but `resume` brings it back."""
    found = find(run)
    found.cancel()
    typer.echo(f"cancelled {found.run_id}")


_FOLLOWS = {
    "requeue": "it saves, leaves and comes back through the queue",
    "finish": "it leaves its training loop, and the code behind the loop runs",
    "pause": "it saves and leaves; go on later with hpcaccel resume {run}",
}
