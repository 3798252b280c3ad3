"""A model that was sharded in a training which has ended, sharded once more over the group of the next one.

What FSDP2 has put into the modules belongs to the earlier group, which is gone, and torch has no way to take it out. So
the modules become what they were, with empty parameters, are sharded anew, and each rank's shards go back into place:
nothing is sent, and no rank ever holds the whole model. That needs the ranks arranged as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcaccel.runtime.parallel import materialise
from hpcaccel.runtime.parallel.dtensors import is_dtensor
from hpcaccel.runtime.parallel.fsdp import Shards

__all__ = ["Kept", "carry_state_over", "put_back", "take_out"]

Kept = list[tuple[nn.Parameter, nn.Parameter]]
"""Each sharded parameter of the earlier training, with the empty whole one that is in the model now."""

_OF_FULLY_SHARD = "__composable_api_state_key"
"""How torch names what ``fully_shard`` keeps in a module's dictionary."""


def take_out(model: nn.Module) -> Kept:
    """Make the modules what they were before they were sharded; their parameters become empty, and come back."""
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
    _module_state_mapping.pop(module, None)
    for name in [name for name in module.__dict__ if str(name).startswith(_OF_FULLY_SHARD)]:
        del module.__dict__[name]
    kinds = type(module).__mro__
    # fully_shard has made a class of FSDPModule and the module's own, in this order.
    module.__class__ = kinds[next(place for place, kind in enumerate(kinds) if kind.__name__ == "FSDPModule") + 1]


def put_back(model: nn.Module, kept: Kept, shards: Shards) -> None:
    """Each rank's shards, in a model that has been sharded as before. ``shards`` learns what became of the parameters
    of the earlier training."""
    if not kept:
        return
    with torch.no_grad():
        for earlier, whole in kept:
            now = shards[whole]
            now.to_local().copy_(earlier.to_local())  # type: ignore[attr-defined]
            shards[earlier] = now
    materialise.has_values(model)


def carry_state_over(optimizer: Optimizer, shards: Shards) -> None:
    """An optimizer's state of parameters of an earlier training becomes that of what they are now."""
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
