"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcaccel.cli.completion import run_names

SpecFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The spec file, such as job.yaml; - is standard input.", show_default=False),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values to change, such as slurm.nodes=4 or args.lr=1e-3.",
        show_default=False,
    ),
]

RUN_HELP = "Run id, the beginning of one, a name (its latest run) or a Slurm job id."

RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=run_names)]

Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A cluster profile, 'slurm' or 'local'. Without it: the default profile, else Slurm where there is one.",
        show_default=False,
    ),
]

RunsDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where run directories are made. Without it: $HPCACCEL_RUNS_DIR, the profile's, or ./runs.",
        show_default=False,
    ),
]

Key = Annotated[str | None, typer.Option("--key", hidden=True, help="Asked twice with one key, submit once.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
