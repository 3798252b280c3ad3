"""The layout of the mesh: how many replicas of the model, shards of each replica, ranks that split sequences, and
tensor-parallel ranks.

The mesh has torch's own dimension names, outermost first: ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``. Neighbouring
ranks are tensor-parallel, because tensor-parallel ranks communicate most.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallelism_config import sequence_size
from hpcaccel.runtime.settings import Settings

__all__ = ["MeshLayout", "arrange"]


class MeshLayout(NamedTuple):
    """Number of ranks in each mesh dimension; their product is the world size."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def data(self) -> int:
        """Number of ranks with different batches."""
        return self.replicate * self.shard

    @property
    def per_batch(self) -> int:
        """Number of neighbouring ranks that work on one batch."""
        return self.context * self.tensor

    @property
    def of_model(self) -> MeshLayout:
        """The layout over which a model is sharded: context-parallel ranks hold shards, too."""
        return MeshLayout(self.replicate, self.shard * self.context, self.tensor)


def arrange(world_size: int, local_world_size: int, settings: Settings, handlers: Any) -> MeshLayout:
    """The layout from settings and plugins; unset sizes are derived from the number of ranks.

    Raises:
        RuntimeMisuse: the product of the sizes is not the number of ranks; sizes conflict; or sequences are to be
            split in a way that cannot be combined with the strategy.
    """
    wanted = handlers.parallelism
    tensor, context = _tensor_size(settings, handlers), _context_size(settings, handlers)
    if sequence_size(wanted) > 1:
        _check_sequence_size(world_size, settings, wanted)
        return MeshLayout(world_size, 1, tensor)
    replicate = wanted.dp_replicate_size if wanted is not None else None
    shard = (wanted.dp_shard_size if wanted is not None else None) or settings.fsdp_shard_size
    if shard is None and "HYBRID" in str(getattr(handlers.fsdp, "sharding_strategy", None)).upper():
        shard = local_world_size
    data, rest = divmod(world_size, tensor * context)
    wanted_shard = shard
    if settings.strategy != "fsdp":
        shard, wanted_shard = 1, None if replicate is None else 1
    elif shard is None:
        shard = max(1, data // (replicate or 1))
    found = MeshLayout(data // shard, shard, tensor, context)
    if rest or found.data != data or replicate not in (None, 1, found.replicate) or found.replicate < 1:
        sizes = {"dp_replicate": replicate, "dp_shard": wanted_shard, "cp": context, "tp": tensor}
        where = " (fsdp.shard_size, tensor_parallel_size, context_parallel_size, ParallelismConfig)"
        raise _does_not_fit(world_size, sizes, where=where)
    return found


def _does_not_fit(world_size: int, sizes: Mapping[str, int | None], *, where: str = "") -> RuntimeMisuse:
    """The error about sizes that do not fit the number of ranks. It leaves out those that are not set.

    Args:
        where: where the sizes may be set, in parentheses.
    """
    data = {name: size for name, size in sizes.items() if name.startswith("dp_") and size is not None}
    others = {name: size for name, size in sizes.items() if not name.startswith("dp_") and size not in (None, 1)}
    shown = ", ".join(f"{name}={size}" for name, size in {**data, **others}.items())
    ranks = f"{world_size} rank{'s' * (world_size != 1)}"
    return RuntimeMisuse(
        f"{ranks} cannot be arranged as {shown}: the product of all sizes must equal the number of ranks "
        f"(data-parallel sizes that are not set follow from it). Change the sizes{where} or the number of ranks"
    )


def _tensor_size(settings: Settings, handlers: Any) -> int:
    """Size of the tensor-parallel dimension.

    Raises:
        RuntimeMisuse: the settings and plugins set different sizes.
    """
    return _one_size(
        "tensor",
        {
            "ParallelismConfig": getattr(handlers.parallelism, "tp_size", None),
            "TorchTensorParallelPlugin": getattr(handlers.tensor_parallel, "tp_size", None),
            "runtime.tensor_parallel_size": settings.tensor_parallel_size,
        },
    )


def _context_size(settings: Settings, handlers: Any) -> int:
    """Size of the context-parallel dimension.

    Raises:
        RuntimeMisuse: the settings and the ``ParallelismConfig`` set different sizes; or the strategy is ``deepspeed``.
    """
    config = handlers.parallelism
    size = _one_size(
        "context",
        {
            "ParallelismConfig": getattr(config, "cp_size", None),
            "runtime.context_parallel_size": settings.context_parallel_size,
        },
    )
    if size > 1 and settings.strategy == "deepspeed":
        raise RuntimeMisuse(
            f"context parallelism (cp_size={size}) cannot be combined with DeepSpeed. DeepSpeed splits sequences "
            f"itself: ParallelismConfig(sp_size={size}). Or use strategy=fsdp"
        )
    if size == 1 and getattr(config, "cp_handler", None) is not None:
        warnings.warn("ParallelismConfig(cp_handler=...) has no effect, since cp_size is 1", stacklevel=2)
    return size


def _check_sequence_size(world_size: int, settings: Settings, config: Any) -> None:
    """Raise RuntimeMisuse if DeepSpeed cannot split sequences as the script requests."""
    size, data = config.sp_size, config.data_parallel_size
    if settings.strategy != "deepspeed":
        raise RuntimeMisuse(
            f"ParallelismConfig(sp_size={size}): DeepSpeed splits the sequences, but the strategy is "
            f"{settings.strategy}. Pass Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3)), or use torch: "
            f"ParallelismConfig(cp_size={size})"
        )
    if world_size % size or (data > 1 and data * size != world_size):
        sizes = {"dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, "sp": size}
        raise _does_not_fit(world_size, sizes)


def _one_size(kind: str, sizes: Mapping[str, int | None]) -> int:
    """The size that is not 1, by the places that may set it.

    Raises:
        RuntimeMisuse: two places set different sizes.
    """
    named = {name: size for name, size in sizes.items() if size not in (None, 1)}
    if len(set(named.values())) > 1:
        raise RuntimeMisuse(
            f"conflicting {kind}-parallel sizes: {', '.join(f'{name}={size}' for name, size in named.items())}. "
            "Set the size in one place"
        )
    return next((size for size in named.values() if size is not None), 1)
