"""The text of a first spec file, with what the cluster has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from hpcaccel.slurm.states import Association, PartitionInfo

__all__ = ["choose_account", "choose_partition", "starter_spec"]

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
        script: path of the training script, relative to the file; None: there is none yet.
        schema: path of the JSON Schema for editors, relative to the file.
        partitions: what sinfo knows; none: there is no Slurm, and the file holds placeholders.
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
    """A partition that is up: with GPUs if there is one, the cluster's default if that fits, else the largest."""
    up = [partition for partition in partitions if partition.available]
    with_gpus = [partition for partition in up if partition.gpus_per_node] or up
    return max(with_gpus, key=lambda partition: (partition.default, partition.nodes), default=None)


def choose_account(associations: Sequence[Association], partition: str) -> Association | None:
    """The account to charge in ``partition``: the user's default if it may be used there."""
    usable = [one for one in associations if one.partition in (None, "", partition)]
    return max(usable, key=lambda one: one.default, default=None)


def _where(partition: PartitionInfo, partitions: Sequence[PartitionInfo], associations: Sequence[Association]) -> str:
    """The lines of the ``slurm`` section that depend on the cluster."""
    lines = [_line(f"partition: {_scalar(partition.name)}", _partitions(partitions))]
    account = choose_account(associations, partition.name)
    if account is not None:
        accounts = ", ".join(sorted({one.account for one in associations}))
        lines.append(_line(f"account: {_scalar(account.account)}", f"yours: {accounts}"))
    lines.append("  nodes: 1")
    if partition.gpus_per_node:
        kinds = f" ({', '.join(partition.gpu_types)})" if partition.gpu_types else ""
        lines.append(_line(f"gpus_per_node: {partition.gpus_per_node}", f"one rank for each{kinds}"))
    else:
        lines.append(_line("ntasks_per_node: 1", "ranks of a node; this partition has no GPUs"))
    cpus = max(1, partition.cpus_per_node // (partition.gpus_per_node or 1))
    lines.append(_line(f"cpus_per_task: {cpus}", f"for each rank; a node has {partition.cpus_per_node}"))
    lines.append(f'  time: "{_time(partition)}"')
    return "\n".join(lines)


def _line(setting: str, comment: str) -> str:
    return f"  {setting:<34}# {comment}"


def _partitions(partitions: Sequence[PartitionInfo]) -> str:
    """``gpu (2 GPUs a node), cpu``."""
    return ", ".join(
        f"{one.name} ({one.gpus_per_node} GPUs a node)" if one.gpus_per_node else one.name
        for one in partitions
        if one.available
    )


def _time(partition: PartitionInfo) -> str:
    """A day, or what the partition allows when that is less, as sbatch writes it."""
    seconds = min(DAY_SECONDS, partition.time_limit_seconds or DAY_SECONDS)
    days, rest = divmod(max(60, seconds), DAY_SECONDS)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


_NOT_TEXT = re.compile(r"(true|false|null|yes|no|on|off|y|n|[.]inf|[.]nan)$", re.IGNORECASE)


def _scalar(text: str) -> str:
    """``text`` as a YAML scalar that every reader takes for a string."""
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
  # There was no Slurm to ask when this file was written. On the cluster, `sinfo` lists the partitions and
  # `sacctmgr show associations user=$USER` the accounts.
  # partition: gpu
  # account: my_project
  nodes: 1
  gpus_per_node: 1                  # one rank for each
  cpus_per_task: 4                  # for each rank
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
  strategy: ddp                     # or fsdp: parameters in shards, for models that do not fit on one GPU
  mixed_precision: bf16
  seed: 0

checkpoint:
  every_minutes: 30
  keep: 2                           # the newest so many

resilience:
  requeue: true                     # preempted or out of time: save, go back into the queue, continue
  warning_seconds: 120              # how long before the end the job is told; more where saves take longer
"""
