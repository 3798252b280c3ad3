"""FSDP2's backward hooks for outputs that FSDP2 does not search, such as objects of the script's own classes.

FSDP2 gathers a module's parameters for the backward pass, and reduces its gradients to the shards, in hooks on the
tensors that the module returns. FSDP2 finds tensors in tuples, lists and dicts, and in newer releases also in
dataclasses and in subclasses of dict. Without a hook the gradients stay on the whole parameters of the forward pass,
the optimizer steps shards without gradients, and nothing is trained; or, if the parameters were freed in between, the
backward pass fails. ``ShardedModels`` registers the same hook on the other tensors.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor

__all__ = ["ShardedModels", "tensors_in"]

LARGEST = 10_000
"""Maximum number of objects that are searched in an output."""
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
"""Types that are not searched: they contain no result, or refer to unrelated objects."""
_MISSED = "_hpcaccel_missed_output"
"""Attribute of a sharded module: a tuple of its last output's type and why tensors in that output may have been missed,
or None."""
_NONE_FOUND = "in which no tensor with a grad_fn was found"
_TOO_LARGE = f"in which only the first {LARGEST:,} objects were searched for tensors"


class ShardedModels:
    """The session's models that are sharded with FSDP2."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        """Their sharded modules. The list is changed in place."""

    def add(self, model: nn.Module) -> None:
        """Register the backward hook on the tensors that the sharded modules of ``model`` return from now on."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        for module in model.modules() if fsdp is not None else ():
            if isinstance(module, fsdp.FSDPModule):
                self.modules.append(module)
                if _add_hooks not in module._forward_hooks.values():
                    module.register_forward_hook(_add_hooks)

    def clear(self) -> None:
        self.modules.clear()

    def refuse_lost_gradients(self, optimizer: Optimizer) -> None:
        """Check the gradients before an optimizer step.

        Raises:
            RuntimeMisuse: gradients of the optimizer's parameters have not been reduced to their shards.
        """
        if not self.modules:
            return
        lost = [parameter for module in self.modules for parameter in _without_gradient(module)]
        if not lost:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = [parameter._param_fqn for parameter in lost if id(parameter.sharded_param) in stepped]
        if names:
            shown = ", ".join(map(str, names[:3])) + (", …" if len(names) > 3 else "")
            raise RuntimeMisuse(
                f"the gradients of {len(names)} sharded parameter{'s' * (len(names) > 1)} ({shown}) were not reduced "
                f"across the ranks, so the optimizer step would not use them. {self.cause() or _OTHER_CAUSE}"
            )

    def cause(self) -> str | None:
        """Error text about an output in which some tensors may not have been found; None if no such output is known."""
        outputs = [(module, module.__dict__.get(_MISSED)) for module in self.modules]
        missed = [(module, *output) for module, output in outputs if output is not None]
        if not missed:
            return None
        # Prefer an output that was searched completely: an incomplete search may have missed nothing.
        module, kind, why = min(missed, key=lambda found: found[2] == _TOO_LARGE)
        return (
            f"{type(module).__name__.removeprefix('FSDP')} returned an object of type {kind}, {why}. Return the "
            "tensors directly, or in a tuple, a dict, a dataclass or attributes of an object"
        )


_OTHER_CAUSE = (
    "Check that this step has a backward pass, and that the last one is not inside no_sync(): the last backward pass "
    "before an optimizer step must reduce the gradients"
)


def _without_gradient(module: Any) -> Iterator[Any]:
    """FSDP2's records of the parameters whose gradients have not been reduced to their shards."""
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


@torch._disable_dynamo  # type: ignore[attr-defined]  # like FSDP2's own hooks
def _add_hooks(module: Any, arguments: Any, output: Any) -> None:
    """Forward hook that runs after FSDP2's own hook: registers the backward hook on the tensors that FSDP2 did not
    find."""
    if not torch.is_grad_enabled():
        return
    missed = None
    if type(output) is not torch.Tensor:
        state, kind = module._get_fsdp_state(), type(output).__qualname__
        tensors, is_whole = tensors_in(output)
        if not (tensors and is_whole):
            missed = kind, _NONE_FOUND if is_whole else _TOO_LARGE
        hooked = set(map(id, _found_by_torch(output, state)))
        for tensor in tensors:
            if id(tensor) not in hooked:
                tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
    module.__dict__[_MISSED] = missed


def _found_by_torch(output: Any, state: Any) -> Sequence[Any]:
    """The tensors that FSDP2's own hook finds in ``output``. Releases of torch differ in the containers they search."""
    find = getattr(sys.modules[type(state).__module__], "collect_grad_tensors", None)
    found: Sequence[Any] = tree_flatten(output)[0] if find is None else find(output)
    return found


def tensors_in(output: Any) -> tuple[list[torch.Tensor], bool]:
    """Returns all tensors with a ``grad_fn`` that are reachable from ``output``, and whether the search was complete.
    Items of containers are searched before attributes, because attributes may refer to unrelated objects."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    near, far = [output], list[Any]()
    while near or far:
        value = near.pop() if near else far.pop()
        if id(value) in seen or isinstance(value, _NOT_ENTERED):
            continue
        if len(seen) == LARGEST:
            return found, False
        seen[id(value)] = value  # a reference, so that no other object gets its id
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                found.append(value)
            continue
        near.extend(_content(value))
        far.extend(_attributes(value))
    return found, True


def _content(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from value
    for name in getattr(type(value), "__dataclass_fields__", ()):
        yield getattr(value, name, None)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)
