"""``init``: a first spec file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.output import note
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.slurm.states import Association, PartitionInfo

__all__ = ["init"]

SCHEMA = Path(".hpcaccel") / "job.schema.json"
"""Where the schema for editors lies, beside the spec file."""


def init(
    script: Annotated[
        Path | None,
        typer.Argument(metavar="[SCRIPT]", help="The training script, such as train.py.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "job.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented job.yaml that fits this machine's cluster."""
    from hpcaccel.cli.spec_template import starter_spec

    if output.exists() and not force:
        raise UserError(f"{output} is there already. Write another file with --output, or over it with --force")
    script = _found(script, output)
    partitions, associations = _ask_slurm()
    text = starter_spec(
        name=_name(script if script is not None else output),
        script=_relative(script, output) if script is not None else None,
        schema=SCHEMA.as_posix(),
        partitions=partitions,
        associations=associations,
    )
    _write(output, text)
    typer.echo(f"wrote {output}, and {output.parent / SCHEMA} for editors that complete and check YAML")
    typer.echo(f"next: hpcaccel validate {output}")


def _found(script: Path | None, output: Path) -> Path | None:
    """The script that was named, or a ``train.py`` beside the file that is to be written."""
    if script is None:
        beside = output.parent / "train.py"
        return beside if beside.is_file() else None
    if not script.is_file():
        raise UserError(f"there is no script {script}")
    return script


def _name(path: Path) -> str:
    """A name for runs, from the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "job"


def _relative(script: Path, output: Path) -> str:
    return Path(os.path.relpath(script, output.parent)).as_posix()


def _ask_slurm() -> tuple[list[PartitionInfo], list[Association]]:
    """What the cluster has. A Slurm that does not answer is reported and costs only the answers."""
    import getpass

    from hpcaccel.slurm.commands import Slurm

    slurm = Slurm()
    if not slurm.available():
        return [], []
    try:
        return slurm.partitions(), slurm.associations(getpass.getuser())
    except HpcaccelError as error:
        note(f"Slurm did not say what this cluster has, so the file holds placeholders: {error}")
        return [], []


def _write(output: Path, text: str) -> None:
    import json

    from hpcaccel.core.run_dir import atomic_write
    from hpcaccel.spec import schema

    schema_file = output.parent / SCHEMA
    try:
        schema_file.parent.mkdir(exist_ok=True)
        atomic_write(schema_file, json.dumps(schema(), indent=1) + "\n")
        atomic_write(output, text)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
