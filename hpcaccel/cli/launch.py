"""`hpcaccel launch`: start the ranks of a script on this machine, or on all nodes of an allocation."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperCommand

from hpcaccel.cli.output import note

__all__ = ["LaunchCommand", "launch"]


class LaunchCommand(TyperCommand):
    """A command that leaves its arguments to ``launch.arguments``: those after the script belong to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[FLAGS] SCRIPT [ARGUMENTS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from hpcaccel.launch.flags import GROUPS, spelled

        for title, flags in GROUPS.items():
            with formatter.section(title):
                rows = [(", ".join(map(spelled, (*flag.also, flag.name))), _help(flag)) for flag in flags]
                formatter.write_dl(rows, col_max=46)


def _help(flag: Any) -> str:
    return f"{flag.help} ({', '.join(flag.choices)})" if flag.choices else str(flag.help)


def launch(context: typer.Context) -> None:
    """Start a script on all GPUs of this machine or, in a Slurm allocation, of all its nodes.

    Has the flags of Accelerate's launcher and of torchrun, with dashes or underscores. Default: one rank on each GPU,
    or one on the CPU. What comes after the script is passed to it.
    """
    from hpcaccel.launch.arguments import parse
    from hpcaccel.launch.launch_config import find_config, load_config
    from hpcaccel.launch.launch_plan import become, plan_launch
    from hpcaccel.launch.step_launch import run_step

    arguments = parse(context.args)
    if arguments.values.get("help"):
        typer.echo(context.get_help())
        return
    given = arguments.values.get("config_file")
    # As Accelerate: --cpu is for a quick try, for which the settings of the default file are too much.
    path = None if given is None and arguments.values.get("cpu") else find_config(given)
    plan = plan_launch(arguments, None if path is None else load_config(path), os.environ)
    for sentence in plan.notes:
        note(f"note: {sentence}")
    if plan.job_id is None:
        become(plan)
    raise typer.Exit(run_step(plan.command, plan.environ, job_id=plan.job_id, name=plan.step))
