"""``stop``, ``resume``, ``cancel``: steering a run from outside."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.options import RunName

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
        raise typer.BadParameter("--requeue and --finish exclude each other")


def resume(run: RunName) -> None:
    """Go on with a run that was stopped or has failed, from its newest checkpoint."""


def cancel(run: RunName) -> None:
    """End a run for good, now and without saving."""
