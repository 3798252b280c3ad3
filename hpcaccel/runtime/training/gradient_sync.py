"""Control of gradient reduction: ``no_sync``, ``join_uneven_inputs`` and ``LocalSGD``.

Micro-batches that do not end in an optimizer step skip the reduction, which saves communication. Local SGD averages
parameters after some steps instead: Zhang, De Sa, Mitliagkas, Ré, "Parallel SGD: When does averaging help?" (2016);
Stich, "Local SGD Converges Fast and Communicates Little" (2019).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.gathering import is_checked
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.parallel import compiling

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator import Accelerator
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = [
    "NO_REDUCTION",
    "LocalSGD",
    "NoSync",
    "SyncInBackward",
    "join_uneven_inputs",
    "no_sync",
    "sync_switch",
    "trigger_sync_in_backward",
]

Switch = Callable[[bool], Any]


class NoSync:
    """Context in which backward passes do not reduce gradients. Reusable and reentrant."""

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
    """The ``NoSync`` context of this model. It is created once and reused, because every micro-batch may enter it."""
    found: NoSync | None = model.__dict__.get("_hpcaccel_no_sync")
    if found is None:
        switch = sync_switch(model)
        if switch is None:
            return NO_REDUCTION
        found = NoSync(switch)
        # Avoids nn.Module.__setattr__, which checks for parameters.
        model.__dict__["_hpcaccel_no_sync"] = found
    return found


NO_REDUCTION = NoSync(None)
"""Of models that reduce no gradients: entering it has no effect."""


def sync_switch(model: nn.Module) -> Switch | None:
    """Function that turns gradient reduction on and off; None if the model does not reduce gradients."""
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
    """Context whose backward pass reduces all gradients, including those of forward passes inside ``no_sync``."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model.__dict__.get("_modules", {}).get("_orig_mod") or model
        self._before = (True, True)

    def __enter__(self) -> None:
        model = self._model
        if isinstance(model, DistributedDataParallel):
            self._before = (model.require_backward_grad_sync, model.require_forward_param_sync)
            model.require_backward_grad_sync = model.require_forward_param_sync = True
            # DDP does this at the end of a forward pass, but not inside no_sync.
            model.reducer.prepare_for_backward([])
        elif (switch := sync_switch(model)) is not None:
            switch(True)

    def __exit__(self, *_: object) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync, self._model.require_forward_param_sync = self._before


def trigger_sync_in_backward(model: nn.Module) -> SyncInBackward:
    """Context whose backward pass reduces all gradients of ``model``."""
    return SyncInBackward(model)


@contextmanager
def join_uneven_inputs(setup: Setup, joinables: Sequence[Any], *, even_batches: bool | None) -> Iterator[None]:
    """Context with torch's ``Join``, for gloo and NCCL: ranks that run out of batches keep taking part in gradient
    all-reduces. At its end all ranks have the parameters of the rank that finished last, and deferred saves and stops
    are carried out. If all ranks get the same number of batches, ``Join`` is not enabled.

    Args:
        even_batches: setting of prepared loaders inside the context; None leaves the setting unchanged.

    Raises:
        RuntimeMisuse: a model does not support ``Join``. With ``even_batches``, a sharded one causes a warning instead.
    """
    from torch.distributed.algorithms.join import Join, Joinable

    session = setup.session
    kind = session.distributed_type
    even = setup.settings.even_batches if even_batches is None else even_batches
    if (
        kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        and setup.settings.even_batches
    ):
        warnings.warn(
            "joining is only supported for multi-GPU and multi-CPU training with DistributedDataParallel, not for "
            f"{kind}: join_uneven_inputs() has no effect, and even_batches stays enabled",
            stacklevel=4,
        )
        yield
        return
    if session.group.world_size == 1:
        yield
        return
    items: list[Any] = [compiling.strip(item)[0] for item in joinables]
    for item in items:
        if not isinstance(item, Joinable):
            raise RuntimeMisuse(
                f"join_uneven_inputs({type(item).__name__}): only models wrapped in DistributedDataParallel can "
                "continue after a rank has run out of batches. A sharded model needs all ranks in every step: keep "
                "even_batches enabled"
            )
    loaders: list[Any] = [] if even_batches is None else list(session.prepared.loaders)
    changed = [(loader, loader.even_batches) for loader in loaders]
    if even_batches is not None and any(isinstance(loader.dataset, IterableDataset) for loader in loaders):
        warnings.warn(
            f"join_uneven_inputs(even_batches={even_batches}): in Accelerate this is only supported for map-style "
            "datasets. hpcaccel also applies it to the prepared loaders of iterable datasets",
            stacklevel=4,
        )
    for loader, _ in changed:
        loader.even_batches = even
    accumulation = setup.accumulation
    each = accumulation.sync_each_batch
    # Ranks end at different micro-batches, so they would disagree on the micro-batches that reduce gradients.
    accumulation.sync_each_batch = each or not even
    try:
        # A rank that has run out of batches does no more steps and issues no agreements; the others would wait for it.
        with session.loop.saves_and_stops_deferred(), Join(items, enable=not even, throw_on_early_termination=False):
            yield
    finally:
        accumulation.sync_each_batch = each
        for loader, before in changed:
            loader.even_batches = before


class LocalSGD:
    """Context of a training loop in which ranks average parameters instead of gradients.

    Use ``with LocalSGD(accelerator=..., model=..., local_sgd_steps=8) as local_sgd:``, and call ``local_sgd.step()``
    after each optimizer step. Parameters are averaged over all ranks after every ``local_sgd_steps`` steps, and at the
    end of the block unless the block raises. Optimizer state and buffers are not averaged.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the prepared model, with strategy ``ddp``.
        local_sgd_steps: number of optimizer steps between two averages, at least 1.
        enabled: whether to average at all. If False, DDP averages the gradients in each step as usual.

    Raises:
        RuntimeMisuse: the model is sharded, so its ranks cannot train independently; or ``local_sgd_steps`` is below 1.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise RuntimeMisuse(f"LocalSGD(local_sgd_steps={local_sgd_steps}): local_sgd_steps must be at least 1")
        if enabled and any(is_dtensor(parameter) for parameter in model.parameters()):
            raise RuntimeMisuse(
                "LocalSGD needs the whole model on every rank, but this model is sharded: use strategy='ddp'"
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._group = accelerator._session.group

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            no_sync(self.model).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            no_sync(self.model).__exit__(kind, error, traceback)
            if kind is None:
                self._average()

    def step(self) -> None:
        """Count an optimizer step; average the parameters if due. All ranks must do the same number of steps.

        Raises:
            RuntimeMisuse: a rank does not take part in an average. On GPUs only the first calls are checked, except in
                debug mode.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Average all parameters, with one reduction per dtype.

        Raises:
            RuntimeMisuse: a rank does not take part. On GPUs only the first calls are checked, except in debug mode.
        """
        exchange = self._group.exchange
        assert exchange is not None
        if self._group.device.type == "cpu" or is_checked(exchange, self._group):
            exchange.call("LocalSGD", value=self.num_steps)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.model.parameters():
            by_type.setdefault(parameter.dtype, []).append(parameter.detach())
        for parameters in by_type.values():
            flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
            dist.all_reduce(flat)
            flat /= self._group.world_size
            parts = torch.split(flat, [own.numel() for own in parameters])
            for own, part in zip(parameters, parts, strict=True):
                own.copy_(part.view_as(own))
