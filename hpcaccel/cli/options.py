"""Arguments and options shared by several commands, and the profile selected by --cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.run_names import complete_run

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile

SpecFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Spec file, such as job.yaml; - for standard input.", show_default=False),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values to override, such as slurm.nodes=4 or args.lr=1e-3.",
        show_default=False,
    ),
]

RUN_HELP = "Run ID or a prefix of it, run name (its latest run), or Slurm job ID."

RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=complete_run)]

Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Cluster profile, 'slurm' or 'local'. Default: the default profile, else Slurm on this machine.",
        show_default=False,
    ),
]

RunsDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where run directories are created. Default: $HPCACCEL_RUNS_DIR, the profile's runs_dir, or ./runs.",
        show_default=False,
    ),
]

Key = Annotated[str | None, typer.Option("--key", hidden=True, help="Submit only once for the same key.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def chosen_profile(name: str | None) -> ClusterProfile | None:
    """The profile ``name``, or the default profile if ``name`` is None. Returns None for Slurm on this machine without
    a profile."""
    from hpcaccel.spec import load_profile, profile_names

    if name == "slurm" and name not in profile_names():
        return None
    return load_profile(name)
