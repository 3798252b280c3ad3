"""``config`` and ``env``: Accelerate's configuration file, and a report for bug reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import Json, WholeSummaries
from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.launch.launch_config import LaunchConfig

__all__ = ["app", "env"]

app = typer.Typer(
    cls=WholeSummaries,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config-file",
        "--config_file",
        metavar="FILE",
        help="The configuration file. Default: default_config.yaml in $HF_HOME/accelerate, else in "
        "$XDG_CACHE_HOME/huggingface/accelerate, else in ~/.cache/huggingface/accelerate.",
        show_default=False,
    ),
]
Precision = Annotated[
    str,
    typer.Option("--mixed-precision", "--mixed_precision", metavar="PRECISION", help="no, fp16, bf16 or fp8."),
]


@app.callback()
def config(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    without_questions: Annotated[
        bool, typer.Option("--default", help="Ask nothing: the same as `config default`.")
    ] = False,
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            "--mixed-precision", "--mixed_precision", metavar="PRECISION", help="With --default: no, fp16, bf16 or fp8."
        ),
    ] = None,
) -> None:
    """Ask how `hpcaccel launch` starts ranks, and write the answers to Accelerate's default_config.yaml."""
    if ctx.invoked_subcommand is not None:
        if without_questions or mixed_precision is not None:
            raise UserError(
                f"--default and --mixed-precision go with `hpcaccel config` alone: write the option after "
                f"`hpcaccel config {ctx.invoked_subcommand}` if that command has it"
            )
        ctx.obj = config_file
        return
    if without_questions:
        _write_default(mixed_precision or "no", config_file)
        return
    if mixed_precision is not None:
        raise UserError("--mixed-precision needs --default: without it, a question asks for the precision")
    from hpcaccel.launch.config_questions import ask_everything
    from hpcaccel.launch.launch_config import save_config
    from hpcaccel.launch.terminal_asker import TerminalAsker

    target = _target(config_file)
    save_config(ask_everything(TerminalAsker()), target)
    typer.echo(f"wrote {target}")
    typer.echo("next: hpcaccel launch train.py")


def default(ctx: typer.Context, config_file: ConfigFile = None, mixed_precision: Precision = "no") -> None:
    """Write a configuration file for this machine's GPUs, without questions. An existing file is kept."""
    _write_default(mixed_precision, config_file or ctx.obj)


def update(ctx: typer.Context, config_file: ConfigFile = None) -> None:
    """Bring an old configuration file up to date. The old one is kept as FILE.bak."""
    from hpcaccel.launch.config_update import update_config
    from hpcaccel.launch.launch_config import load_config

    path = _existing(config_file or ctx.obj)
    changes = update_config(path, load_config(path))
    for change in changes:
        typer.echo(change)
    typer.echo(f"updated {path}, and kept the old one as {path}.bak" if changes else f"{path} is up to date")


def show(ctx: typer.Context, config_file: ConfigFile = None, json: Json = False) -> None:
    """Show the configuration file that `hpcaccel launch` would use."""
    import yaml

    path, loaded = _loaded(config_file or ctx.obj)
    if json:
        print_json({"path": str(path), "config": loaded.to_dict()})
        return
    typer.echo(f"# {path}")
    for key in loaded.retired:
        typer.echo(f"# {key} has no effect any more: `hpcaccel config update` removes it")
    typer.echo(yaml.safe_dump(loaded.to_dict()), nl=False)


def to_spec(
    ctx: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Print a job spec with the file's settings: hpcaccel config to-spec train.py > job.yaml."""
    from hpcaccel.launch.config_to_spec import to_spec as spec_of

    path, loaded = _loaded(config_file or ctx.obj)
    if script is not None and not script.is_file():
        raise UserError(f"there is no script file {str(script)!r}")
    name = "train" if script is None else (script.stem.strip("-._") or "train")
    typer.echo(
        spec_of(loaded, source=path.name, name=name, script=None if script is None else script.as_posix()), nl=False
    )


for _name, _command in (("default", default), ("update", update), ("show", show), ("to-spec", to_spec)):
    app.command(_name)(_command)


def env(
    config_file: ConfigFile = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The ranks' Python, which reports torch's version. Default: this one."),
    ] = None,
    json: Json = False,
) -> None:
    """Print what a bug report needs: versions, GPUs, Slurm, file system. Secrets are left out."""
    import sys

    from hpcaccel.launch.environment_report import environment_report

    report = environment_report(config_file=config_file, python=python or sys.executable)
    if json:
        print_json(report)
        return
    from hpcaccel.view.environment_table import print_environment

    print_environment(report)


def _target(config_file: str | None) -> Path:
    """The file to write."""
    from hpcaccel.core.default_config import default_config_path

    return default_config_path() if config_file is None else Path(config_file).expanduser()


def _existing(config_file: str | None) -> Path:
    from hpcaccel.core.default_config import default_config_path
    from hpcaccel.launch.launch_config import find_config

    path = find_config(config_file)
    if path is None:
        raise UserError(
            f"there is no configuration file in {default_config_path().parent}. `hpcaccel config` writes one, and "
            "`hpcaccel config default` one without questions"
        )
    return path


def _loaded(config_file: str | None) -> tuple[Path, LaunchConfig]:
    from hpcaccel.launch.launch_config import load_config

    path = _existing(config_file)
    return path, load_config(path)


def _write_default(mixed_precision: str, config_file: str | None) -> None:
    from hpcaccel.core.default_config import PRECISIONS, basic_config, to_json
    from hpcaccel.launch.environment_report import torch_facts
    from hpcaccel.launch.launch_config import write_config_text

    target = _target(config_file)
    if mixed_precision not in PRECISIONS:
        raise UserError(f"--mixed-precision {mixed_precision!r} is not valid (allowed: {', '.join(PRECISIONS)})")
    if target.exists():
        note(
            f"note: {target} already exists and is kept. Delete it first for a new one, or answer the questions of "
            "`hpcaccel config`"
        )
        return
    facts = torch_facts()
    values = basic_config(mixed_precision, facts.get("kind", "cpu"), len(facts.get("devices", [])))
    write_config_text(target, to_json(values))
    typer.echo(f"wrote {target}: {values['num_processes']} process{'' if values['num_processes'] == 1 else 'es'}")
    if "problem" in facts:
        note(f"note: torch cannot be imported here, so the file sets use_cpu: true ({facts['problem']})")
    elif values["use_cpu"]:
        note("note: there is no GPU here, so the file sets use_cpu: true. On a login node, run this on a GPU node")
