"""``run``: runs a spec inside an existing allocation."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from hpcaccel.cli.options import Cluster, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note
from hpcaccel.cli.remote.target_cluster import behind_ssh
from hpcaccel.errors import UserError

__all__ = ["run"]


def run(
    file: SpecFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN[@STEP]", help="Start from a checkpoint of another run.", show_default=False
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show the output of rank 0.")] = False,
) -> None:
    """Run a spec file now, on the nodes of this shell's allocation (salloc), and wait until it ends.

    The allocation determines nodes, partition and time; on Ctrl-C the ranks save and exit.
    """
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.submission.submit.api import submit_prepared
    from hpcaccel.submission.submit.idempotent import Always
    from hpcaccel.submission.submit.prepare import prepare
    from hpcaccel.submission.submit.salloc import allocation_around, overrides_inside, prepared_inside, run_script
    from hpcaccel.view.log_reader import Logs

    if (there := behind_ssh(cluster)) is not None:
        raise UserError(
            f"{there.name} is behind SSH, and `hpcaccel run` needs a shell inside an allocation there: log in (ssh "
            f"{there.profile.host}), run salloc, then hpcaccel run. To submit from here: hpcaccel submit {file}"
        )
    slurm, around = Slurm(), allocation_around()
    settings = overrides_inside(around, slurm, time.time())
    prepared = prepare(
        str(file),
        cluster=cluster,
        runs_dir=runs_dir,
        overrides=[*(overrides or []), *settings],
        from_run=from_,
        slurm=slurm,
        facts=False,
    )
    for sentence in prepared.advice:
        note(f"note: {sentence}")
    started = submit_prepared(prepared_inside(prepared, around, slurm), once=Always())
    nodes = f"{len(around.nodes)} node{'' if len(around.nodes) == 1 else 's'}"
    note(f"{started.name} is running as {started.run_id} in job {around.job_id} on {nodes}: {started.path}")
    logs = Logs(started.dir)

    def show_output() -> None:
        for chunk in [] if quiet else logs.new():
            sys.stdout.buffer.write(chunk)
        sys.stdout.flush()

    raise typer.Exit(run_script(started.dir, show_output=show_output))
