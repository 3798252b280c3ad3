"""How the ranks are arranged: replicas of the model, shards of each replica, ranks that share each tensor.

One mesh with torch's own names, outermost first: ``dp_replicate``, ``dp_shard``, ``tp``. Neighbouring ranks share
tensors, because they talk most.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "arrange", "build", "data_mesh", "tensor_mesh"]


class Layout(NamedTuple):
    """How many ranks there are in each direction; the product is the number of ranks."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """How many parts the data has."""
        return self.replicate * self.shard


def arrange(world_size: int, local_world_size: int, settings: Settings, handlers: Any) -> Layout:
    """The layout that settings and plugins ask for; what they leave open is filled with the ranks that there are.

    Raises:
        RuntimeMisuse: the sizes do not multiply to the number of ranks.
    """
    wanted = handlers.parallelism
    tensor = _tensor_size(settings, handlers)
    replicate = wanted.dp_replicate_size if wanted is not None else None
    shard = (wanted.dp_shard_size if wanted is not None else None) or settings.fsdp_shard_size
    if shard is None and "HYBRID" in str(getattr(handlers.fsdp, "sharding_strategy", None)).upper():
        shard = local_world_size
    data, rest = divmod(world_size, tensor)
    if settings.strategy != "fsdp":
        shard = 1
    elif shard is None:
        shard = max(1, data // (replicate or 1))
    found = Layout(data // shard, shard, tensor)
    if rest or found.data != data or replicate not in (None, 1, found.replicate) or found.replicate < 1:
        asked = f"dp_replicate={replicate or 'any'}, dp_shard={shard}, tp={tensor}"
        raise RuntimeMisuse(
            f"{world_size} ranks cannot be arranged as {asked}: the product of the sizes must be the number of ranks. "
            "Change the sizes (fsdp.shard_size, tensor_parallel_size, ParallelismConfig) or the number of ranks"
        )
    return found


def _tensor_size(settings: Settings, handlers: Any) -> int:
    """
    Raises:
        RuntimeMisuse: two plugins name different sizes.
    """
    sizes = {
        "ParallelismConfig": getattr(handlers.parallelism, "tp_size", None),
        "TorchTensorParallelPlugin": getattr(handlers.tensor_parallel, "tp_size", None),
        "runtime.tensor_parallel_size": settings.tensor_parallel_size,
    }
    named = {name: size for name, size in sizes.items() if size not in (None, 1)}
    if len(set(named.values())) > 1:
        raise RuntimeMisuse(
            f"tensor parallel of different sizes: {', '.join(f'{name} says {size}' for name, size in named.items())}"
        )
    return next(iter(named.values()), 1)


def build(layout: Layout, device: torch.device, *, sharded: bool) -> DeviceMesh:
    """The mesh of all ranks, for which all of them must call. A direction with a single rank is left out, unless the
    model is sharded along it."""
    from torch.distributed.device_mesh import init_device_mesh

    _forget_earlier_meshes()
    directions = {"dp_replicate": layout.replicate, "dp_shard": layout.shard, "tp": layout.tensor}
    kept = {name: size for name, size in directions.items() if size > 1 or (name == "dp_shard" and sharded)}
    kept = kept or {"dp_replicate": 1}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _forget_earlier_meshes() -> None:
    """torch remembers how it computes with DTensors by meshes that compare equal, and computes on with the one that it
    has seen first. After a group has been destroyed and another one formed, that one's groups are gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in (
        ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
        ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ):
        clear: Any = import_module(module)
        for part in name.split("."):
            clear = getattr(clear, part, None)
        if clear is not None:  # not every version of torch has each of them
            clear()


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The directions along which the data differs."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp_"))
    return mesh[names] if names != mesh.mesh_dim_names else mesh


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The direction along which tensors are shared."""
    return mesh["tp"]
