"""``logs``: what the ranks printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import RUN_HELP
from hpcaccel.cli.output import note
from hpcaccel.cli.which import find, latest, one_run

if TYPE_CHECKING:
    from hpcaccel.rundir import RunDir
    from hpcaccel.view.logs import Logs

__all__ = ["logs"]


def logs(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Without it: the latest run.", show_default=False)
    ] = None,
    rank: Annotated[str, typer.Option(metavar="N", help="A rank, 'all', 'supervisor' or 'batch'.")] = "0",
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="This attempt only. Without it: the newest.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
) -> None:
    """Show what a run printed."""
    import sys

    from hpcaccel.view.logs import Logs, copy_logs
    from hpcaccel.view.watch import Asking

    found = one_run(find(run) if run is not None else latest()).dir
    wanted = Logs(found, rank=rank, attempt=attempt)
    asking = Asking.about(found)
    written = copy_logs(wanted, sys.stdout.buffer, ended=(lambda: asking.now().ended) if follow else None)
    if written == 0:
        _nothing(found, wanted)


def _nothing(run: RunDir, wanted: Logs) -> None:
    """Say why there is nothing; where no rank ever started, what the batch script said tells more."""
    from hpcaccel.view.logs import Logs, copy_logs

    if wanted.rank != "batch" and not wanted.attempts() and run.slurm_log.exists():
        note(f"no attempt has started; this is what the batch script printed ({run.slurm_log}):")
        copy_logs(Logs(run, rank="batch"), sys.stdout.buffer)
        return
    known = ", ".join(map(str, wanted.attempts())) or "none yet"
    note(f"{run.run_id} has printed nothing for --rank {wanted.rank} (attempts: {known})")
