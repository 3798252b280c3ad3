"""Arguments, options and a class of groups shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hpcaccel.cli.run_names import complete_run

SpecFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Spec file, such as job.yaml; - for standard input.", show_default=False),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
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


class WholeSummaries(TyperGroup):
    """A command group whose help shows the full summary of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: command.help or "" for name, command in self.commands.items() if not command.hidden}
        if shown:
            with formatter.section("Commands"):
                rows = [(name, " ".join(text.split("\n\n")[0].split())) for name, text in shown.items()]
                formatter.write_dl(rows, col_max=52)
