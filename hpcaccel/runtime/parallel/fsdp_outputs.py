"""Training sharded models whose forward returns an object of a class of the script's own.

FSDP2 gathers a module's parameters for the backward pass, and hands its gradients out to the shards, by hooks on the
tensors that the module returns. It finds them in tuples, lists and dicts, in newer releases also in dataclasses and in
subclasses of dict. Without a hook the gradients stay with the whole parameters of the forward pass, the optimizer steps
shards that have none, and nothing is trained; or, where the parameters were freed in between, the backward pass fails.
Here the other tensors get the same hook.
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
_MISSED = "_hpcaccel_missed_output"
"""On a sharded module: of which class its last output was, and what it lacks, where not all of it could be used."""
_NONE_FOUND = "in which no tensor is found that leads back to it"
_TOO_LARGE = f"which leads to more than {LARGEST:,} objects, of which no more are looked at"


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
        if not self._modules:
            return
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
        outputs = [(module, module.__dict__.get(_MISSED)) for module in self._modules]
        missed = [(module, *output) for module, output in outputs if output is not None]
        if not missed:
            return None
        module, kind, why = min(missed, key=lambda found: found[2] == _TOO_LARGE)  # may have held all that matters
        return (
            f"{type(module).__name__.removeprefix('FSDP')} returned {kind}, {why}. Return the tensors "
            "themselves, or in a tuple, a dict, a dataclass, or attributes of an object"
        )


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
    """What FSDP2's own hook has found in ``output``. Which containers it enters depends on torch's release."""
    find = getattr(sys.modules[type(state).__module__], "collect_grad_tensors", None)
    found: Sequence[Any] = tree_flatten(output)[0] if find is None else find(output)
    return found


def tensors_in(output: Any) -> tuple[list[torch.Tensor], bool]:
    """Every computed tensor that ``output`` leads to, each once, and whether all of it was looked at. What containers
    hold comes before attributes, which may lead to everything else."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    near, far = [output], list[Any]()
    while near or far:
        value = near.pop() if near else far.pop()
        if id(value) in seen or isinstance(value, _NOT_ENTERED):
            continue
        if len(seen) == LARGEST:
            return found, False
        seen[id(value)] = value  # held: its id might become another's
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
