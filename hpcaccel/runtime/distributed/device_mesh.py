"""A rank's device, and the mesh of all devices.

A task with one visible GPU uses it (index 0). If all GPUs of a node are visible to all its ranks, each rank uses the
GPU whose index is its local rank. A Slurm task with several GPUs of its own would leave all but one idle. This is an
error, except in an interactive ``srun --pty`` shell and with ``HPCACCEL_GPUS_PER_TASK=all``, for a program that
spreads one model over all GPUs of the task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.distributed.mesh_layout import MeshLayout
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.parallelism_config import join_dimensions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "build",
    "choose_device",
    "count_gpus",
    "data_mesh",
    "full",
    "is_dtensor",
    "model_mesh",
    "tensor_mesh",
]


def build(layout: MeshLayout, device: torch.device, *, sharded: bool, config: Any = None) -> DeviceMesh:
    """Create the mesh of all ranks; a collective call.

    Dimensions of size 1 are omitted, except ``dp_shard`` if ``sharded`` is set. If all are omitted, the mesh has only
    ``dp_replicate``.

    Args:
        config: the script's ``ParallelismConfig``, which is given the mesh. The mesh then has Accelerate's joint
            dimensions, too, such as ``dp_cp``.

    Raises:
        RuntimeMisuse: the device is an XLA device.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if device.type == "xla":
        raise RuntimeMisuse(
            "FSDP, tensor and context parallelism are not supported on XLA devices: each rank trains the whole model. "
            "Remove strategy='fsdp', tp_size and cp_size"
        )
    _clear_mesh_caches()
    directions = {"dp_replicate": layout.replicate, "dp_shard": layout.shard, "cp": layout.context}
    directions["tp"] = layout.tensor
    kept = {name: size for name, size in directions.items() if size > 1 or (name == "dp_shard" and sharded)}
    kept = kept or {"dp_replicate": 1}
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if config is not None:
        join_dimensions(mesh)
        config.device_mesh = mesh
    return mesh


def _clear_mesh_caches() -> None:
    """Clear torch's caches of DTensor operations.

    The caches are keyed by mesh. A new mesh can be equal to an old one whose process groups have been destroyed.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in (
        ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
        ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ):
        clear: Any = import_module(module)
        for part in name.split("."):
            clear = getattr(clear, part, None)
        if clear is not None:  # not every torch version has both functions
            clear()


def model_mesh(layout: MeshLayout, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh over which models are sharded: ``mesh``, or one in which shards and context-parallel ranks are one
    dimension; a collective call."""
    return mesh if layout.context == 1 else build(layout.of_model, torch.device(mesh.device_type), sharded=True)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The submesh of the data-parallel dimensions."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp_"))
    return mesh[names] if names != mesh.mesh_dim_names else mesh


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The submesh of the tensor-parallel dimension."""
    return mesh["tp"]


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor. Does not import ``torch.distributed.tensor``: until it is imported, no DTensor
    can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, gathered in a collective call of its mesh's ranks. Other tensors are returned
    unchanged."""
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole


_NONE = ("-1", "NoDevFiles")
"""Values of the variables in ``device_backend.VISIBLE`` that stand for no GPU."""


def choose_device(env: RankEnvironment, *, cpu: bool) -> torch.device:
    """The rank's device: its only visible GPU, the GPU whose index is its local rank, or the CPU. A GPU is also made
    torch's current device.

    With ``HPCACCEL_GPUS_PER_TASK=all``, the device is the first of the rank's GPUs.

    Raises:
        RankEnvironmentError: this node has fewer visible GPUs than ranks, or this Slurm task would leave GPUs idle.
    """
    if cpu:
        return torch.device("cpu")
    _refuse_idle_gpus(env, os.environ)
    kind = device_backend.accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    if kind in device_backend.KINDS and device_backend.KINDS[kind].chooses_itself:
        device = device_backend.current_device(kind)
    else:
        count = device_backend.device_count(kind)
        index = _index(env, count)
        if index >= count or (count == 1 and env.local_world_size > 1 and not device_backend.own_devices()):
            raise RankEnvironmentError(_too_few(env, count, device_backend.vendor(kind)))
        device = torch.device(kind, index)
    device_backend.set_device(device)
    return device


def _index(env: RankEnvironment, count: int) -> int:
    if count == 1:
        return 0
    if _takes_all(os.environ):
        # Either the task sees only its own GPUs, or its GPUs follow those of the previous local rank.
        return 0 if os.environ.get("SLURM_GPUS_PER_TASK") else env.local_rank * (count // env.local_world_size)
    return env.local_rank


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of GPUs visible to this process, from the launcher's variables, else from torch."""
    for name in device_backend.VISIBLE:
        if name in environ:
            return len([word for word in environ[name].split(",") if word.strip() and word.strip() not in _NONE])
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdigit() else device_backend.device_count()


def _refuse_idle_gpus(env: RankEnvironment, environ: Mapping[str, str]) -> None:
    # In a shell opened by srun --pty, which is for experiments, idle GPUs are accepted.
    if env.source != "slurm" or _takes_all(environ) or "SLURM_PTY_PORT" in environ:
        return
    each = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    alone_on_nodes = env.largest_node == 1
    count = count_gpus(environ) if alone_on_nodes else int(each) if each.isdigit() else 1
    if count > 1:
        each_node = count * env.largest_node
        raise RankEnvironmentError(
            f"this Slurm task sees {count} GPUs but would use only one of them. Request one task per GPU "
            f"(ntasks_per_node: {each_node}, or srun --ntasks-per-node={each_node}), or start the ranks of each "
            f"task with torchrun (launcher: torchrun, or entrypoint.command: [torchrun, --nproc-per-node={count}, "
            f"train.py]; by hand: srun torchrun --nproc-per-node {count} train.py). "
            "If one process uses all GPUs of the task, set HPCACCEL_GPUS_PER_TASK=all"
        )


def _takes_all(environ: Mapping[str, str]) -> bool:
    return environ.get("HPCACCEL_GPUS_PER_TASK", "").lower() == "all"


def _too_few(env: RankEnvironment, count: int, vendor: str) -> str:
    name = next((name for name in device_backend.VISIBLE if name in os.environ), device_backend.VISIBLE[0])
    return (
        f"local rank {env.local_rank} has no GPU of its own: the {env.local_world_size} ranks on this node see only "
        f"{count} ({vendor}; {name}={os.environ.get(name, 'not set')}). "
        "Request one GPU per rank, or train with Accelerator(cpu=True)"
    )
