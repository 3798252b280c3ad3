"""``init``: writes a first spec file, with the partitions and accounts of the cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.output import note
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.slurm.states import Association, PartitionInfo

__all__ = ["choose_account", "choose_partition", "init", "starter_spec"]


SCHEMA = Path(".hpcaccel") / "job.schema.json"
"""Path of the JSON Schema for editors, relative to the spec file's directory."""


def init(
    script: Annotated[
        Path | None,
        typer.Argument(metavar="SCRIPT", help="The training script, such as train.py.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "job.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented job.yaml that fits this machine's cluster."""
    if output.exists() and not force:
        raise UserError(f"{output} already exists. Choose another file with --output, or overwrite it with --force")
    script = _found(script, output)
    partitions, associations = _query_slurm()
    text = starter_spec(
        name=_name(script if script is not None else output),
        script=_relative(script, output) if script is not None else None,
        schema=SCHEMA.as_posix(),
        partitions=partitions,
        associations=associations,
    )
    _write(output, text)
    typer.echo(f"wrote {output}, and {output.parent / SCHEMA} for completion and checks in editors")
    typer.echo(f"next: hpcaccel validate {output}")


def _found(script: Path | None, output: Path) -> Path | None:
    """``script`` or, if it is None, the file ``train.py`` beside ``output``; None if there is no ``train.py``.

    Raises:
        UserError: ``script`` is given and does not exist.
    """
    if script is None:
        beside = output.parent / "train.py"
        return beside if beside.is_file() else None
    if not script.is_file():
        raise UserError(f"there is no script file {str(script)!r}")
    return script


def _name(path: Path) -> str:
    """A run name derived from the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "job"


def _relative(script: Path, output: Path) -> str:
    return Path(os.path.relpath(script, output.parent)).as_posix()


def _query_slurm() -> tuple[list[PartitionInfo], list[Association]]:
    """Returns the cluster's partitions and the user's accounts. Both lists are empty if there is no Slurm, or if a
    query fails, which prints a note."""
    import getpass

    from hpcaccel.slurm.commands import Slurm

    slurm = Slurm()
    if not slurm.available():
        return [], []
    try:
        return slurm.partitions(), slurm.associations(getpass.getuser())
    except HpcaccelError as error:
        note(f"could not get partitions and accounts from Slurm, so the file has placeholders: {error}")
        return [], []


def _write(output: Path, text: str) -> None:
    from hpcaccel.core.durable_files import atomic_write
    from hpcaccel.spec import schema

    schema_file = output.parent / SCHEMA
    try:
        schema_file.parent.mkdir(exist_ok=True)
        atomic_write(schema_file, json.dumps(schema(), indent=1) + "\n")
        atomic_write(output, text)
    except OSError as error:
        raise UserError(f"cannot write {output} and {schema_file}: {error.strerror}. Choose another --output") from None


# -- the text of the file -----------------------------------------------------------------------------------------


DAY_SECONDS = 86_400


def starter_spec(
    *,
    name: str,
    script: str | None,
    schema: str,
    partitions: Sequence[PartitionInfo] = (),
    associations: Sequence[Association] = (),
) -> str:
    """The text of a commented spec file.

    Args:
        script: path of the training script, relative to the spec file; None if there is no script yet.
        schema: path of the JSON Schema for editors, relative to the spec file.
        partitions: partitions of the cluster; if none is available, the spec file has placeholders.
        associations: the accounts that the user may charge.
    """
    partition = choose_partition(partitions)
    entrypoint = _SCRIPT.format(script=_scalar(script)) if script is not None else _COMMAND
    return _FILE.format(
        schema=schema,
        name=_scalar(name),
        entrypoint=entrypoint,
        where=_where(partition, partitions, associations) if partition is not None else _PLACEHOLDERS,
    )


def choose_partition(partitions: Sequence[PartitionInfo]) -> PartitionInfo | None:
    """The partition to propose: the cluster's default, else the largest; None if no partition is available.

    Available partitions with GPUs take precedence, even over a default partition without GPUs.
    """
    up = [partition for partition in partitions if partition.available]
    with_gpus = [partition for partition in up if partition.gpus_per_node] or up
    return max(with_gpus, key=lambda partition: (partition.default, partition.nodes), default=None)


def choose_account(associations: Sequence[Association], partition: str) -> Association | None:
    """An account to which jobs in ``partition`` may be charged, preferably the user's default; None if there is no such
    account."""
    usable = [one for one in associations if one.partition in (None, "", partition)]
    return max(usable, key=lambda one: one.default, default=None)


def _where(partition: PartitionInfo, partitions: Sequence[PartitionInfo], associations: Sequence[Association]) -> str:
    """The lines of the ``slurm`` section that depend on the cluster."""
    lines = [_line(f"partition: {_scalar(partition.name)}", _partitions(partitions))]
    account = choose_account(associations, partition.name)
    if account is not None:
        accounts = ", ".join(sorted({one.account for one in associations}))
        lines.append(_line(f"account: {_scalar(account.account)}", f"your accounts: {accounts}"))
    lines.append("  nodes: 1")
    if partition.gpus_per_node:
        kinds = f" ({', '.join(partition.gpu_types)})" if partition.gpu_types else ""
        lines.append(_line(f"gpus_per_node: {partition.gpus_per_node}", f"one rank per GPU{kinds}"))
    else:
        lines.append(_line("ntasks_per_node: 1", "ranks per node; this partition has no GPUs"))
    cpus = max(1, partition.cpus_per_node // (partition.gpus_per_node or 1))
    lines.append(_line(f"cpus_per_task: {cpus}", f"per rank; a node has {partition.cpus_per_node}"))
    lines.append(f'  time: "{_time(partition)}"')
    return "\n".join(lines)


def _line(setting: str, comment: str) -> str:
    return f"  {setting:<34}# {comment}"


def _partitions(partitions: Sequence[PartitionInfo]) -> str:
    """The available partitions, such as ``gpu (2 GPUs per node), cpu``."""
    return ", ".join(
        f"{one.name} ({one.gpus_per_node} GPU{'s' * (one.gpus_per_node > 1)} per node)"
        if one.gpus_per_node
        else one.name
        for one in partitions
        if one.available
    )


def _time(partition: PartitionInfo) -> str:
    """The time limit to propose, in sbatch's format: one day, or the partition's limit if that is shorter."""
    seconds = min(DAY_SECONDS, partition.time_limit_seconds or DAY_SECONDS)
    days, rest = divmod(max(60, seconds), DAY_SECONDS)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


_NOT_TEXT = re.compile(r"(true|false|null|yes|no|on|off|y|n|[.]inf|[.]nan)$", re.IGNORECASE)


def _scalar(text: str) -> str:
    """``text`` as a YAML scalar that every parser reads as a string."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", text) and not _NOT_TEXT.match(text):
        return text
    return json.dumps(text, ensure_ascii=False)


_SCRIPT = """\
  script: {script}
  args: {{}}                          # {{lr: 3.0e-4, depth: 4}} becomes --lr 3.0e-4 --depth 4"""

_COMMAND = """\
  # Put your training script here instead:
  # script: train.py
  # args: {lr: 3.0e-4}              # becomes --lr 3.0e-4
  command: [echo, "hello from a rank"]"""

_PLACEHOLDERS = """\
  # No available partition was known when this file was written. On the cluster, `sinfo` lists the partitions
  # and `sacctmgr show associations user=$USER` the accounts.
  # partition: gpu
  # account: my_project
  nodes: 1
  gpus_per_node: 1                  # one rank per GPU
  cpus_per_task: 4                  # per rank
  time: "1-00:00:00\""""

_FILE = """\
# yaml-language-server: $schema={schema}
# Check it with `hpcaccel validate`, see the batch script with `hpcaccel render`, start it with `hpcaccel submit`.
name: {name}

entrypoint:
{entrypoint}

slurm:
{where}

runtime:
  strategy: ddp                     # or fsdp: shards the parameters, for models that do not fit on one GPU
  mixed_precision: bf16
  seed: 0

checkpoint:
  every_minutes: 30
  keep: 2                           # number of newest checkpoints to keep

resilience:
  requeue: true                     # on preemption or at the time limit: save, requeue, continue
  warning_seconds: 120              # time to save before the job ends; increase it if saves take longer
"""
