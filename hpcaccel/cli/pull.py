"""``pull``: results of a run on a cluster behind SSH, brought here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcaccel.cli.options import Json, RunName, RunsDir
from hpcaccel.cli.output import print_json
from hpcaccel.cli.remote.dispatch import behind_ssh_run
from hpcaccel.errors import UserError

__all__ = ["pull"]


def pull(
    run: RunName,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="This checkpoint too: a step, 'last', or 'best'.", show_default=False),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What 'best' goes by. Without it: val_loss, else loss.", show_default=False),
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="The best is the largest, not the smallest.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Where to. Without it: as if it had run here.", show_default=False
        ),
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Fetch a run's logs, metrics and records from the cluster, and a checkpoint; what is here stays.

    A pull that was cut off goes on where it was.
    """
    from hpcaccel.core.run_dir import default_runs_dir
    from hpcaccel.submission.remote.pulling import pull as fetch

    found = behind_ssh_run(run)
    if found is None:
        raise UserError(f"{run} is not on a cluster behind SSH: it is here already, or write CLUSTER:RUN")
    cluster, run_id = found
    base = default_runs_dir() if runs_dir is None else runs_dir.absolute()
    with cluster:
        pulled = fetch(
            cluster, run_id, None if out is None else out.absolute(),
            runs_dir=base, checkpoint=checkpoint, metric=metric, largest=largest,
        )  # fmt: skip
    if json:
        print_json(
            {"path": str(pulled.path), "files": pulled.files, "bytes": pulled.bytes, "unchanged": pulled.unchanged,
             "checkpoint": pulled.checkpoint}
        )  # fmt: skip
        return
    with_checkpoint = "" if pulled.checkpoint is None else f", {pulled.checkpoint} included"
    typer.echo(
        f"{pulled.path}: {pulled.files} files, {pulled.bytes / 1e6:.1f} MB{with_checkpoint} "
        f"({pulled.unchanged} were here already)"
    )
