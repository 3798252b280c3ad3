"""How many ranks to start on how many machines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.launch_options import flag

__all__ = ["GroupSize", "machines", "ranks_here", "ranks_per_machine", "sized", "total_ranks"]

_WORDS = ("gpu", "cpu", "xpu", "auto")


@dataclass(frozen=True)
class GroupSize:
    """The machines, and the ranks on each of them."""

    machines: str
    """A number, or MIN:MAX with different numbers."""
    per_machine: str
    """A number, or one of torchrun's words (gpu, cpu, xpu, auto), which it resolves on each machine."""

    @property
    def is_one(self) -> bool:
        return self.machines == "1" and self.per_machine == "1"


def machines(options: Mapping[str, Any]) -> tuple[int, int]:
    """The smallest and the largest number of machines; (1, 1) if no option names one.

    Raises:
        UserError: not a number or a range of numbers of at least 1.
    """
    name = "nnodes" if "nnodes" in options else "num_machines"
    text = str(options.get(name, 1))
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if low < 1 or high < low:
        raise UserError(f"{flag(options, name)} must be a number of machines of at least 1, or MIN:MAX such as 1:4")
    return low, high


def sized(options: Mapping[str, Any], *, gpus: int) -> GroupSize:
    """The group of ranks, outside of an allocation.

    Args:
        gpus: the number of GPUs visible on this machine.

    Raises:
        UserError: the options contradict each other or this machine.
    """
    low, high = machines(options)
    count = str(low) if low == high else f"{low}:{high}"
    per = ranks_per_machine(options, low, high)
    chosen = _chosen_gpus(options)
    available = gpus if chosen is None else min(gpus, chosen) if gpus else chosen
    if options.get("multi_gpu") and not options.get("cpu") and gpus == 0:
        raise UserError(
            "--multi-gpu, or distributed_type MULTI_GPU in the configuration file, is set, but no GPU is visible on "
            "this machine (nvidia-smi -L, CUDA_VISIBLE_DEVICES). To try it on CPUs, use --cpu --num-processes 2"
        )
    if per is None:
        per = "1" if options.get("cpu") else str(available or 1)
    if per.isdecimal() and options.get("multi_gpu") and not options.get("cpu") and int(per) > available:
        where = "on each machine" if high > 1 else "with --multi-gpu"
        raise UserError(f"{per} ranks {where} need a GPU each, but this machine has {available}")
    return GroupSize(count, per)


def ranks_here(size: GroupSize, *, gpus: int) -> int:
    """The ranks that torchrun starts on this machine: it resolves ``gpu``, ``xpu``, ``cpu`` and ``auto`` in this way.

    Args:
        gpus: the number of GPUs that the ranks see.
    """
    if size.per_machine.isdecimal():
        return int(size.per_machine)
    if size.per_machine == "cpu" or (size.per_machine == "auto" and not gpus):
        return os.cpu_count() or 1
    return max(1, gpus)


def total_ranks(size: GroupSize) -> int | None:
    """The number of ranks on all machines; None if it is known only when they start."""
    known = size.machines.isdecimal() and size.per_machine.isdecimal()
    return int(size.machines) * int(size.per_machine) if known else None


def ranks_per_machine(options: Mapping[str, Any], low: int, high: int) -> str | None:
    """The ranks on each machine, as the options name them; None if they do not.

    Raises:
        UserError: ``num_processes`` and ``nproc_per_node`` contradict each other, or the ranks cannot be spread evenly.
    """
    total, per = options.get("num_processes"), options.get("nproc_per_node")
    if per is not None:
        if per not in _WORDS and (not str(per).isdecimal() or int(per) < 1):
            raise UserError(f"{flag(options, 'nproc_per_node')} must be a number of at least 1, or {', '.join(_WORDS)}")
        if total is not None and (low != high or str(per) != str(total / low).removesuffix(".0")):
            many = f"{low} machine{'s' * (low > 1)}" if low == high else f"{low} to {high} machines"
            raise UserError(
                f"--num-processes {total} (all ranks) and --nproc-per-node {per} (ranks on each machine) contradict "
                f"each other on {many}: leave one of them out"
            )
        return str(per)
    if total is None:
        return None
    if total < 1:
        raise UserError(f"--num-processes {total} must be at least 1")
    if options.get("multi_gpu") and total < 2:
        raise UserError(f"--multi-gpu with --num-processes {total}: several GPUs need at least 2 ranks")
    if low != high:
        raise UserError(f"--num-processes {total} with --nnodes {low}:{high}: use --nproc-per-node")
    if total % low:
        raise UserError(
            f"--num-processes {total} counts the ranks on all machines, and cannot be spread evenly over {low} machines"
        )
    return str(total // low)


def _chosen_gpus(options: Mapping[str, Any]) -> int | None:
    """The number of GPUs in ``gpu_ids``; None if it names none, or all."""
    ids = options.get("gpu_ids")
    if ids in (None, "all"):
        return None
    words = [word.strip() for word in str(ids).split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UserError(f"--gpu-ids {ids!r} must be 'all', or distinct indices separated by commas, such as 0,1")
    return len(words)
