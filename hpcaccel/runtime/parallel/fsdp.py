"""A model sharded over the ranks: torch's ``fully_shard`` (FSDP2), block by block.

Rank 0's parameters and buffers count: scripts seed per rank, and shards of different initialisations are no model. They
are shared one block at a time, so that a GPU needs to hold one whole block only, never the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.parallel import materialise
from hpcaccel.runtime.parallel.dtensors import is_dtensor
from hpcaccel.runtime.parallel.fsdp_choices import Choices, ignored_parameters
from hpcaccel.runtime.parallel.wrapping import owned_alone

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Shards", "Tensors", "point_to_shards", "shard", "share_all"]

Shards = WeakIdKeyDictionary
"""What whole parameters became when their model was sharded. Holds on to none of the whole ones."""

Tensors = WeakIdKeyDictionary
"""A set of tensors, by identity. Holds on to none: a model is never in memory as a whole on its account."""


def shard(model: nn.Module, group: Group, mesh: DeviceMesh, choices: Choices, *, done: Tensors) -> None:
    """Shard a model in place over ``mesh`` (one dimension, or replicas times shards).

    Parameters on the meta device get memory for their shards, and no values yet.

    Args:
        done: tensors that all ranks have in common already.

    Raises:
        RuntimeMisuse: CPU offload where there is no GPU, or models that differ from rank to rank.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if choices.cpu_offload and group.device.type == "cpu":
        raise RuntimeMisuse(
            "fsdp.cpu_offload keeps shards in the node's memory instead of the GPU's, and this training runs on CPUs: "
            "the shards are there already. Leave it out"
        )
    ignored = ignored_parameters(model, choices.ignored)
    empty = _empty_on_main(model, group)
    policy = MixedPrecisionPolicy(
        param_dtype=choices.param_dtype, reduce_dtype=choices.reduce_dtype, output_dtype=choices.output_dtype
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": choices.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if choices.cpu_offload else OffloadPolicy(),
    }
    if ignored:
        options["ignored_params"] = ignored
    for parameter in ignored:
        parameter.data = parameter.to(group.device)
    for block in [*owned_alone(model, choices.find_blocks(model)), model]:
        _share(block, group, empty=empty, done=done)
        fully_shard(block, **options)
    if any(tensor.is_meta for tensor in _tensors(model)):
        shards_on = torch.device("cpu") if choices.cpu_offload else group.device
        materialise.give_memory(model, shards_on, buffers_on=group.device)


def share_all(model: nn.Module, group: Group, *, done: Tensors) -> None:
    """Rank 0's parameters and buffers on all ranks' devices, except those that are empty there too."""
    _share(model, group, empty=_empty_on_main(model, group), done=done)


def _empty_on_main(model: nn.Module, group: Group) -> Tensors:
    """Which of this rank's tensors have no values on rank 0.

    Raises:
        RuntimeMisuse: the ranks have built different models.
    """
    tensors = list(_tensors(model))
    own = [(tensor.is_meta, tuple(tensor.shape)) for tensor in tensors]
    main = group.from_main(own)
    if [shape for _, shape in main] != [shape for _, shape in own]:
        raise RuntimeMisuse(
            f"rank {group.rank} has built another model than rank 0: {len(own)} parameters and buffers here, "
            f"{len(main)} there, or other shapes. All ranks must build the same model"
        )
    return Tensors({tensor: True for tensor, (is_empty, _) in zip(tensors, main, strict=True) if is_empty})


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _share(module: nn.Module, group: Group, *, empty: Tensors, done: Tensors) -> None:
    """Rank 0's values in this module's tensors, except those in ``empty`` and in ``done``, which grows."""
    if group.world_size == 1:
        return
    if any(tensor.is_meta and tensor not in empty for tensor in _tensors(module)):
        # Empty here, full on rank 0.
        materialise.give_memory(module, group.device, but={id(tensor) for tensor in empty}, expect=False)
    tensors = [
        tensor
        for tensor in _tensors(module)
        if not (tensor in empty or tensor in done or tensor.is_meta or is_dtensor(tensor))
    ]
    done.update(dict.fromkeys(tensors, True))
    with torch.no_grad():
        works = [_broadcast(tensor, group) for tensor in tensors]
        for work, sent, target in works:
            work.wait()
            if sent.data_ptr() != target.data_ptr():
                target.copy_(sent)


def _broadcast(tensor: torch.Tensor, group: Group) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The broadcast under way, the tensor that it fills, and the one whose values they are to be."""
    if tensor.device.type != group.device.type:
        tensor.data = tensor.to(group.device)
    sent = tensor.detach()
    sent = sent if sent.is_contiguous() else sent.contiguous()
    return dist.broadcast(sent, src=0, async_op=True), sent, tensor


def point_to_shards(optimizer: Optimizer, shards: Shards) -> None:
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
        group["params"] = list(map(shards.get, group["params"], group["params"]))
    _step_one_by_one_where_meshes_mix(optimizer)


def _step_one_by_one_where_meshes_mix(optimizer: Optimizer) -> None:
    """torch steps many tensors in one call, but not tensors that are spread over ranks in different ways: with tensor
    parallel those of the plan and the others."""
    meshes = {
        tensor.device_mesh if is_dtensor(tensor) else None
        for group in optimizer.param_groups
        for tensor in group["params"]
    }
    if len(meshes) > 1:
        for settings in [*optimizer.param_groups, optimizer.defaults]:
            if "foreach" in settings:
                settings["foreach"] = False
            if settings.get("fused"):
                settings["fused"] = False
