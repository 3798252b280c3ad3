"""``logs``: what the ranks printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.completion import run_names
from hpcaccel.cli.options import RUN_HELP
from hpcaccel.cli.output import note
from hpcaccel.cli.run_lookup import find, latest, one_run

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.view.log_reader import Logs

__all__ = ["logs"]


def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help=f"{RUN_HELP} Without it: the latest run.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    rank: Annotated[str, typer.Option(metavar="N", help="A rank, 'all', 'supervisor', 'batch', or a component.")] = "0",
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="This attempt only. Without it: the newest.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
) -> None:
    """Show what a run printed."""
    from hpcaccel.cli.remote.run_commands import logs_there

    if logs_there(run, rank=rank, attempt=attempt, follow=follow):
        return
    from hpcaccel.view.log_reader import Logs, copy_logs
    from hpcaccel.view.watch import Asking

    found = one_run(find(run) if run is not None else latest()).dir
    wanted = Logs(found, rank=rank, attempt=attempt)
    asking = Asking.about(found)
    written = copy_logs(wanted, sys.stdout.buffer, ended=(lambda: asking.now().ended) if follow else None)
    if written == 0:
        _nothing(found, wanted)


def follow_from(request: Mapping[str, Any], write: Callable[[bytes, dict[str, Any]], None]) -> str:
    """For another machine: what is asked for and was not read yet, piece by piece, each with the place behind it.

    Returns:
        What to say where there was nothing at all.
    """
    from hpcaccel.view.log_reader import LOOK_SECONDS, Logs
    from hpcaccel.view.watch import Asking

    found = one_run(find(request["run"]) if request["run"] is not None else latest()).dir
    wanted = Logs(found, rank=request["rank"], attempt=request["attempt"])
    if request["position"] is not None:
        wanted.go_on(request["position"])
    asking = Asking.about(found)
    nothing = request["position"] is None
    while True:
        over = not request["follow"] or asking.now().ended
        for chunk in wanted.new(last=over):
            write(chunk, wanted.position())
            nothing = False
        if over:
            break
        time.sleep(LOOK_SECONDS)
    if not nothing:
        return ""
    if wanted.rank != "batch" and not wanted.attempts() and found.slurm_log.exists():
        return f"no attempt has started; this is what the batch script printed:\n{found.slurm_log.read_text()}"
    known = ", ".join(map(str, wanted.attempts())) or "none yet"
    return f"{found.run_id} has printed nothing for --rank {wanted.rank} (attempts: {known})\n"


def _nothing(run: RunDir, wanted: Logs) -> None:
    """Say why there is nothing; where no rank ever started, what the batch script said tells more."""
    from hpcaccel.view.log_reader import Logs, copy_logs

    if wanted.rank != "batch" and not wanted.attempts() and run.slurm_log.exists():
        note(f"no attempt has started; this is what the batch script printed ({run.slurm_log}):")
        copy_logs(Logs(run, rank="batch"), sys.stdout.buffer)
        return
    known = ", ".join(map(str, wanted.attempts())) or "none yet"
    note(f"{run.run_id} has printed nothing for --rank {wanted.rank} (attempts: {known})")
