"""``submit``: from a spec file to a job in the queue."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir, SpecFile

__all__ = ["submit"]


def submit(
    file: SpecFile,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="An array with one task a combination; may be given again."),
    ] = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; its result is the exit code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and submit nothing.")] = False,
    json: Json = False,
) -> None:
    """Submit a spec file as a job, or as an array with --grid."""
