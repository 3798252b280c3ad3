"""Training sharded models whose forward returns an object of a class of the script's own.

FSDP2 gathers a module's parameters for the backward pass, and hands its gradients out to the shards, by hooks on the
tensors that the module returns. It finds them in tuples, lists, dicts and dataclasses only. Without a hook the
gradients stay with the whole parameters of the forward pass, the optimizer steps shards that have none, and nothing is
trained; or, where the parameters were freed in between, the backward pass fails. Here the other tensors get the same
hook.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.dtensors import is_dtensor

__all__ = ["ShardedModels", "tensors_in"]

LARGEST = 10_000
"""So many objects of an output are looked at."""
_NOT_ENTERED = (
    nn.Module,
    Optimizer,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
)
"""What is no part of a result, and what leads from it to everything else."""
_OPAQUE = "_hpcaccel_opaque_output"
"""On a sharded module: the class of its last output, where no tensor could be found in it."""


class ShardedModels:
    """The models of a session that FSDP2 has sharded."""

    def __init__(self) -> None:
        self._modules: list[Any] = []

    def add(self, model: nn.Module) -> None:
        """From now on the backward pass finds every tensor that the sharded parts of ``model`` return."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        for module in model.modules() if fsdp is not None else ():
            if isinstance(module, fsdp.FSDPModule):
                self._modules.append(module)
                if _add_hooks not in module._forward_hooks.values():
                    module.register_forward_hook(_add_hooks)

    def clear(self) -> None:
        self._modules.clear()

    def refuse_lost_gradients(self, optimizer: Optimizer) -> None:
        """Before each step.

        Raises:
            RuntimeMisuse: parameters that ``optimizer`` is to step have gradients that their shards have not got.
        """
        lost = [parameter for module in self._modules for parameter in _without_gradient(module)]
        if not lost:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = [parameter._param_fqn for parameter in lost if id(parameter.sharded_param) in stepped]
        if names:
            shown = ", ".join(map(str, names[:3])) + (", …" if len(names) > 3 else "")
            raise RuntimeMisuse(
                f"{len(names)} sharded parameters ({shown}) have gradients that are not shared among the ranks, and "
                f"the step would leave them as they are. {self.cause() or _OTHER_CAUSE}"
            )

    def cause(self) -> str | None:
        """Which output has kept FSDP2 from finding the way back, as far as it is known."""
        for module in self._modules:
            if kind := module.__dict__.get(_OPAQUE):
                name = type(module).__name__.removeprefix("FSDP")
                return (
                    f"{name} returned {kind}, in which no tensor is found that leads back to it. Return the tensors "
                    "themselves, or in a tuple, a dict, a dataclass, or attributes of an object"
                )
        return None


_OTHER_CAUSE = (
    "Were the last gradients computed inside no_sync, or in no backward pass of this step? The last backward pass "
    "before a step must share them"
)


def _without_gradient(module: Any) -> Iterator[Any]:
    """FSDP2's records of the parameters whose gradients have not come to their shards."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None else group.fsdp_params:
            gradient = parameter.sharded_param.grad
            if gradient is not None:
                if not is_dtensor(gradient):
                    yield parameter
            elif parameter.unsharded_accumulated_grad is not None or _has_gradient(parameter):
                yield parameter


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and whole.grad is not None


@torch._disable_dynamo  # type: ignore[attr-defined]  # as FSDP2's own hooks
def _add_hooks(module: Any, arguments: Any, output: Any) -> None:
    """After FSDP2's own hook, which has cared for what it can find."""
    if not torch.is_grad_enabled():
        return
    opaque = None
    if type(output) is not torch.Tensor:
        state = module._get_fsdp_state()
        opaque = type(output).__qualname__
        for tensor, is_hidden in tensors_in(output):
            opaque = None
            if is_hidden:
                tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
    module.__dict__[_OPAQUE] = opaque


def tensors_in(output: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every computed tensor that ``output`` leads to, each once, and whether FSDP2 passes it over."""
    seen: dict[int, Any] = {}
    visible, hidden = [output], list[Any]()
    while (visible or hidden) and len(seen) < LARGEST:
        value, rest = (visible.pop(), visible) if visible else (hidden.pop(), hidden)
        if id(value) in seen or isinstance(value, _NOT_ENTERED):
            continue
        seen[id(value)] = value  # held: its id might become another's
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield value, rest is hidden
            continue
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list | tuple):
            rest.extend(value)
        elif isinstance(value, Mapping):
            hidden.extend(value.values())
        elif isinstance(value, deque | set | frozenset):
            hidden.extend(value)
        for name in getattr(type(value), "__dataclass_fields__", ()):
            rest.append(getattr(value, name, None))
        hidden.extend(_attributes(value))


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)
