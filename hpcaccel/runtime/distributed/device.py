"""Which device a rank has: one rule, for everything that asks.

A task that sees one GPU has it, index 0; where the ranks of a node see all of its GPUs, each has the one of its local
rank. A Slurm task that has several GPUs to itself would leave all but one idle, which is an error unless
``HPCACCEL_GPUS_PER_TASK=all`` says that its program spreads one model over them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.rank_env import RankEnvironment

__all__ = ["choose_device", "count_gpus"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE = ("-1", "NoDevFiles")


def choose_device(env: RankEnvironment, *, cpu: bool) -> torch.device:
    """The rank's device: its one visible GPU, or the GPU of its local rank, or the CPU.

    Raises:
        RankEnvironmentError: this node has fewer visible GPUs than ranks, or a Slurm task has several to itself.
    """
    if cpu:
        return torch.device("cpu")
    _refuse_idle_gpus(env, os.environ)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = _index(env, count)
    if index >= count or (count == 1 and env.local_world_size > 1 and not _own_gpu()):
        raise RankEnvironmentError(_too_few(env, count))
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _index(env: RankEnvironment, count: int) -> int:
    if count == 1:
        return 0
    if _takes_all(os.environ):
        # Either the task sees its own GPUs only, or it begins where those of its neighbour end.
        return 0 if os.environ.get("SLURM_GPUS_PER_TASK") else env.local_rank * (count // env.local_world_size)
    return env.local_rank


def count_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs this process can see, as its launcher and then as torch says."""
    for name in _VISIBLE:
        if name in environ:
            return len([word for word in environ[name].split(",") if word.strip() and word.strip() not in _NONE])
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdigit() else torch.cuda.device_count()


def _refuse_idle_gpus(env: RankEnvironment, environ: Mapping[str, str]) -> None:
    # A shell that srun --pty has opened is for trying things out.
    if env.source != "slurm" or _takes_all(environ) or "SLURM_PTY_PORT" in environ:
        return
    each = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    alone_on_nodes = env.largest_node == 1
    count = count_gpus(environ) if alone_on_nodes else int(each) if each.isdigit() else 1
    if count > 1:
        raise RankEnvironmentError(
            f"this Slurm task sees {count} GPUs and would use one of them. Ask for one task per GPU "
            f"(ntasks_per_node: {count}, srun --ntasks-per-node={count}), or let each task start its ranks with "
            f"launcher: torchrun, that is entrypoint.command: [torchrun, --nproc-per-node={count}, train.py], by hand "
            f"srun torchrun --nproc-per-node {count} train.py. "
            "HPCACCEL_GPUS_PER_TASK=all says that one process is to use them all"
        )


def _takes_all(environ: Mapping[str, str]) -> bool:
    return environ.get("HPCACCEL_GPUS_PER_TASK", "").lower() == "all"


def _own_gpu() -> bool:
    """Whether the launcher gave this rank a GPU of its own, as Slurm does with ``--gpus-per-task=1``."""
    return any(os.environ.get(name) for name in _VISIBLE)


def _too_few(env: RankEnvironment, count: int) -> str:
    return (
        f"local rank {env.local_rank} has no GPU: this node shows {count} to {env.local_world_size} ranks "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
        "Ask for as many GPUs per node as ranks, or train with Accelerator(cpu=True)"
    )
