"""Sharding of a model over the ranks with torch's ``fully_shard`` (FSDP2), block by block.

All ranks start from rank 0's parameters and buffers, because a script may seed each rank differently. These tensors are
broadcast one block at a time, so that a GPU does not need memory for the whole model.
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
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.parallel import meta_device
from hpcaccel.runtime.parallel.fsdp_choices import FsdpChoices, ignored_parameters
from hpcaccel.runtime.parallel.wrapping import owned_alone

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Shards",
    "Tensors",
    "carry_state_over",
    "point_to_shards",
    "restore_shards",
    "shard",
    "share_all",
    "unshard",
]

Shards = WeakIdKeyDictionary
"""Maps whole parameters, through weak references, to their sharded parameters."""

Tensors = WeakIdKeyDictionary
"""A set of tensors, by identity. Its references are weak, so that it keeps no tensor in memory."""

Kept = list[tuple[nn.Parameter, nn.Parameter]]
"""Pairs of a sharded parameter of the earlier training and the empty whole parameter that replaces it."""

_OF_FULLY_SHARD = "__composable_api_state_key"
"""Prefix of ``fully_shard``'s keys in a module's dictionary."""


def shard(model: nn.Module, group: RankGroup, mesh: DeviceMesh, choices: FsdpChoices, *, done: Tensors) -> None:
    """Shard a model in place over ``mesh`` (one dimension, or replicas times shards).

    Parameters that rank 0 has on the meta device get memory for their shards, but no values yet.

    Args:
        done: tensors that are already equal on all ranks. The tensors that are broadcast here are added.

    Raises:
        RuntimeMisuse: CPU offload is set, but the training runs on CPUs; the ranks have built different models; a class
            named for wrapping does not occur in the model (see ``wrapping.blocks``); or a module on the meta device
            cannot compute its buffers (see ``meta_device.give_memory``).
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if choices.cpu_offload and group.device.type == "cpu":
        raise RuntimeMisuse(
            "fsdp.cpu_offload moves shards from GPU memory to host memory, but this training runs on CPUs: remove "
            "fsdp.cpu_offload"
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
    for block in owned_alone(model, choices.find_blocks(model)):
        _share(block, group, empty=empty, done=done)
        fully_shard(block, **options)
    _share(model, group, empty=empty, done=done)
    # The backward pass begins with the outermost module, so freeing its parameters would only gather them twice.
    fully_shard(model, **(options | {"reshard_after_forward": False}))
    if choices.reshard_after_forward is not False:
        model.register_forward_hook(_free_without_backward)
    if any(tensor.is_meta for tensor in _tensors(model)):
        shards_on = torch.device("cpu") if choices.cpu_offload else group.device
        meta_device.give_memory(model, shards_on, buffers_on=group.device)


def _free_without_backward(model: Any, inputs: Any, outputs: Any) -> None:
    """A forward hook: free the outermost module's gathered parameters after a pass without gradients. Not done
    while ``torch.compile`` traces the pass, so that the graph does not contain it."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        model.reshard()


def share_all(model: nn.Module, group: RankGroup, *, done: Tensors) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks' devices, except those in ``done`` and those that
    rank 0 has on the meta device."""
    _share(model, group, empty=_empty_on_main(model, group), done=done)


def _empty_on_main(model: nn.Module, group: RankGroup) -> Tensors:
    """This rank's tensors that have no values on rank 0.

    Raises:
        RuntimeMisuse: the ranks have built different models.
    """
    tensors = list(_tensors(model))
    own = [(tensor.is_meta, tuple(tensor.shape)) for tensor in tensors]
    main = group.from_main(own)
    if [shape for _, shape in main] != [shape for _, shape in own]:
        difference = (
            "its parameters or buffers have different shapes"
            if len(own) == len(main)
            else f"it has {len(own)} parameters and buffers instead of {len(main)}"
        )
        raise RuntimeMisuse(
            f"the model of rank {group.rank} differs from rank 0's: {difference}. All ranks must create the same model"
        )
    return Tensors({tensor: True for tensor, (is_empty, _) in zip(tensors, main, strict=True) if is_empty})


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _share(module: nn.Module, group: RankGroup, *, empty: Tensors, done: Tensors) -> None:
    """Broadcast rank 0's values of this module's tensors, except tensors in ``empty`` and ``done``, and add them to
    ``done``."""
    if group.world_size == 1:
        return
    if any(tensor.is_meta and tensor not in empty for tensor in _tensors(module)):
        # Some tensors are empty on this rank, but not on rank 0.
        meta_device.give_memory(module, group.device, but={id(tensor) for tensor in empty}, expect=False)
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


def _broadcast(tensor: torch.Tensor, group: RankGroup) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Start a broadcast. Returns the operation, the tensor that it fills, and the tensor to which to copy the
    values."""
    if tensor.device.type != group.device.type:
        tensor.data = tensor.to(group.device)
    sent = tensor.detach()
    sent = sent if sent.is_contiguous() else sent.contiguous()
    return dist.broadcast(sent, src=0, async_op=True), sent, tensor


def point_to_shards(optimizer: Optimizer, shards: Shards) -> None:
    """Replace whole parameters with their sharded parameters in an optimizer.

    Raises:
        RuntimeMisuse: the optimizer already has state for whole parameters.
    """
    for group in optimizer.param_groups:
        if any(parameter in shards and optimizer.state.get(parameter) for parameter in group["params"]):
            raise RuntimeMisuse(
                "the optimizer already has state for the unsharded parameters. Call prepare() before the optimizer's "
                "first step, and load its state afterwards"
            )
        group["params"] = list(map(shards.get, group["params"], group["params"]))
    _step_one_by_one_where_meshes_mix(optimizer)


def _step_one_by_one_where_meshes_mix(optimizer: Optimizer) -> None:
    """Disable multi-tensor steps if the optimizer's tensors have different meshes, as with tensor parallelism.

    torch cannot combine such tensors in one operation.
    """
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


# -- the same model in another training --------------------------------------------------------------------------------
# FSDP2's state in the modules belongs to the earlier process group, and torch cannot remove it. So the modules are
# reset to their state before sharding, with empty parameters, sharded again, and each rank's shards are copied back:
# nothing is sent, and no rank ever has the whole model. The ranks must be arranged as before.


def unshard(model: nn.Module) -> Kept:
    """Reset the modules to their state before sharding, with empty parameters. Returns pairs (sharded parameter, empty
    parameter)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            _unhook(module)
    kept: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_dtensor(parameter):
                continue
            if id(parameter) not in kept:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                kept[id(parameter)] = parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = kept[id(parameter)][1]
    return list(kept.values())


def _unhook(module: Any) -> None:
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        if handle is not None:
            handle.remove()
    for key in [key for key, hook in module._forward_hooks.items() if hook is _free_without_backward]:
        del module._forward_hooks[key]
    _module_state_mapping.pop(module, None)
    for name in [name for name in module.__dict__ if str(name).startswith(_OF_FULLY_SHARD)]:
        del module.__dict__[name]
    kinds = type(module).__mro__
    # fully_shard has set a class with the bases FSDPModule and the module's own class.
    module.__class__ = kinds[next(place for place, kind in enumerate(kinds) if kind.__name__ == "FSDPModule") + 1]


def restore_shards(model: nn.Module, kept: Kept, shards: Shards) -> None:
    """Copy each rank's shards back into a model that has been sharded as before, and map the earlier training's
    parameters to the current ones in ``shards``."""
    if not kept:
        return
    with torch.no_grad():
        for earlier, whole in kept:
            now = shards[whole]
            now.to_local().copy_(earlier.to_local())  # type: ignore[attr-defined]
            shards[earlier] = now
    meta_device.has_values(model)


def carry_state_over(optimizer: Optimizer, shards: Shards) -> None:
    """Move an optimizer's state from the parameters of an earlier training to the current parameters."""
    for parameter in list(optimizer.state):
        now = shards.get(parameter, None)  # type: ignore[no-untyped-call]
        if now is None or not is_dtensor(parameter):
            continue
        state = optimizer.state.pop(parameter)
        optimizer.state[now] = {name: _moved(value, now) for name, value in state.items()}


def _moved(value: Any, now: Any) -> Any:
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to_local(),
        now.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
