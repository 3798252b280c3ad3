"""Whether a backward pass shares its gradients with the other ranks. Micro-batches that do not end in an optimizer
step keep them, which saves the communication."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["NoSync", "SyncInBackward", "no_sync", "sync_switch", "trigger_sync_in_backward"]

Switch = Callable[[bool], Any]


class NoSync:
    """Backward passes inside keep their gradients to this rank. Can be entered again and again, and nested."""

    __slots__ = ("_depth", "_switch")

    def __init__(self, switch: Switch | None) -> None:
        self._switch = switch
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and self._switch is not None:
            self._switch(False)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._switch is not None:
            self._switch(True)


def no_sync(model: nn.Module) -> NoSync:
    """The context of this model; made once, for it is entered in every micro-batch."""
    found: NoSync | None = model.__dict__.get("_hpcaccel_no_sync")
    if found is None:
        switch = sync_switch(model)
        if switch is None:
            return _NOTHING
        found = NoSync(switch)
        # Past nn.Module.__setattr__, which looks for parameters.
        model.__dict__["_hpcaccel_no_sync"] = found
    return found


_NOTHING = NoSync(None)


def sync_switch(model: nn.Module) -> Switch | None:
    """What turns the sharing of gradients on and off; None where there is nothing to share."""
    model = model.__dict__.get("_modules", {}).get("_orig_mod") or model
    if isinstance(model, DistributedDataParallel):
        return _DDPSwitch(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
        if sharded:
            return _FSDPSwitch(sharded)
    return None


class _DDPSwitch:
    __slots__ = ("_model",)

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def __call__(self, on: bool) -> None:
        self._model.require_backward_grad_sync = on


class _FSDPSwitch:
    __slots__ = ("_modules",)

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def __call__(self, on: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(on, recurse=False)


class SyncInBackward:
    """The next backward pass shares all gradients, those of forward passes inside ``no_sync`` too."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model.__dict__.get("_modules", {}).get("_orig_mod") or model
        self._before = (True, True)

    def __enter__(self) -> None:
        model = self._model
        if isinstance(model, DistributedDataParallel):
            self._before = (model.require_backward_grad_sync, model.require_forward_param_sync)
            model.require_backward_grad_sync = model.require_forward_param_sync = True
            # Normally done at the end of the forward pass, which did not know that its gradients would be shared.
            model.reducer.prepare_for_backward([])
        elif (switch := sync_switch(model)) is not None:
            switch(True)

    def __exit__(self, *_: object) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync, self._model.require_forward_param_sync = self._before


def trigger_sync_in_backward(model: nn.Module) -> SyncInBackward:
    """Share all gradients of ``model`` in the backward pass inside this context."""
    return SyncInBackward(model)
