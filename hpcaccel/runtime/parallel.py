"""One model on many ranks: DDP or FSDP2, by a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.precision import COMPUTE_DTYPES
from hpcaccel.runtime.process_group import Group
from hpcaccel.runtime.settings import Settings

__all__ = ["no_sync", "point_to_shards", "shard", "unwrap", "wrap_ddp"]


def wrap_ddp(model: nn.Module, group: Group, settings: Settings) -> nn.Module:
    """DDP around a model with something to train; other models, and any model of a lone rank, as they are."""
    if group.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    # After the first backward DDP rearranges its buckets in the order in which gradients came. A resumed run would
    # then sum its first steps in another order than the undisturbed one. Looking for unused parameters forbids it
    # (and makes torch say once, from C++, that it found none).
    return DistributedDataParallel(
        model,
        device_ids=[group.device.index] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.deterministic,
    )


def shard(model: nn.Module, group: Group, settings: Settings) -> dict[nn.Parameter, nn.Parameter]:
    """Shard a model in place with FSDP2; what each of its old parameters became.

    Rank 0's parameters and buffers count: scripts seed per rank, and shards of different initialisations are no model.
    """
    old = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in old.values()):
        return {}
    if group.world_size > 1:
        _share_from_main(model)
    mesh = init_device_mesh(group.device.type, (group.world_size,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy()
    if settings.mixed_precision in COMPUTE_DTYPES:
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[settings.mixed_precision], reduce_dtype=torch.float32)
    for block in [*_blocks(model, settings.fsdp_wrap), model]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    new = dict(model.named_parameters())
    return {parameter: new[name] for name, parameter in old.items()}


def _share_from_main(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def _blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules that are sharded one by one: those of the named classes, else the repeated members of module lists.

    Raises:
        RuntimeMisuse: a named class does not occur in the model.
    """
    if names:
        present = {type(module).__name__ for module in model.modules()}
        if missing := sorted(set(names) - present):
            raise RuntimeMisuse(
                f"fsdp.wrap names {', '.join(missing)}, which the model does not contain "
                f"(has: {', '.join(sorted(present))})"
            )
        return [module for module in model.modules() if type(module).__name__ in names]
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside:
            counts = Counter(type(child) for child in module)
            found = [child for child in module if counts[type(child)] > 1 and any(True for _ in child.parameters())]
            found = [child for child in found if any(True for _ in child.children())]
            blocks += found
            inside.update(inner for child in found for inner in child.modules())
    return blocks


def point_to_shards(optimizer: Optimizer, shards: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make an optimizer that was built on whole parameters step their shards.

    Raises:
        RuntimeMisuse: the optimizer has state of whole parameters already.
    """
    for group in optimizer.param_groups:
        if any(parameter in shards and optimizer.state.get(parameter) for parameter in group["params"]):
            raise RuntimeMisuse(
                "the optimizer has state already, which belongs to the model before it was sharded. "
                "Call prepare() before the first step, and load state afterwards"
            )
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module. A sharded model is the user's module already, with shards for parameters."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside add to the local gradients without communication."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return _fsdp_no_sync(model)


@contextmanager
def _fsdp_no_sync(model: nn.Module) -> Iterator[None]:
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
