"""Data parallelism with torch's DistributedDataParallel: each rank has the whole model, and gradients are averaged."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import xla_device
from hpcaccel.runtime.distributed.device_backend import device_ids
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.parallel import compiling, precision
from hpcaccel.runtime.settings import Settings

__all__ = ["PreparedDDP", "is_engine", "unwrap", "wrap"]

_PACKING = ("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction", "static_graph")
"""Fields of ``DistributedDataParallelKwargs`` that are passed to DDP if the script has changed them."""


class PreparedDDP(DistributedDataParallel):
    """DDP that communicates in training steps only, so that a single rank can evaluate."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        # DDP broadcasts buffers before a forward only if require_forward_param_sync is set, that is, if the previous
        # forward was a training forward. An evaluation on a single rank must not change the flag, or the next broadcast
        # would hang.
        flag = self.require_forward_param_sync
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_forward_param_sync = flag

    def will_sync_module_buffers(self) -> bool:
        """Whether to broadcast rank 0's buffers: only before the forward pass of a training step."""
        wanted: bool = super().will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return wanted and self.training and torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
            raise AttributeError(
                f"{name!r} is an attribute of {type(module).__name__}, which prepare() has wrapped: use "
                f"accelerator.unwrap_model(model).{name}"
            ) from None


def wrap(model: nn.Module, group: RankGroup, settings: Settings, handler: Any = None) -> nn.Module:
    """Wrap a model with trainable parameters in DDP. Other models, and models of a single process, are returned as they
    are; on XLA all models, after rank 0's parameters and buffers were copied to all ranks.

    Args:
        handler: a ``DistributedDataParallelKwargs``, or None.

    Raises:
        RuntimeMisuse: the comm hook or its wrapper is unknown, or torch rejects them.
    """
    if group.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    if group.device.type == "xla":
        xla_device.share(model)
        return model
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if handler is not None:
        changed = handler.to_kwargs()
        options |= {name: changed[name] for name in _PACKING if name in changed}
        options["gradient_as_bucket_view"] = handler.gradient_as_bucket_view
    if settings.deterministic:
        # After the first backward DDP rearranges its buckets in the order in which gradients arrived, so a resumed run
        # would sum its first steps in another order than an uninterrupted one. Searching for unused parameters disables
        # the rearrangement (and makes torch warn once, from C++, that it found none).
        options["find_unused_parameters"] = True
    prepared = PreparedDDP(model, device_ids=device_ids(group.device), **options)
    if handler is not None:
        _register_comm_hook(prepared, handler)
    return prepared


def unwrap(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """The user's own module, without DDP, DeepSpeed's engine and ``torch.compile``.

    Other modules are returned unchanged, including sharded models, which are the user's own module already.

    Args:
        keep_fp32_wrapper: keep the mixed-precision forward; if False, restore the module's own forward.
        keep_torch_compile: wrap the result with ``torch.compile`` again.
        recursive: also remove wrappers inside the module, in place.
    """
    inner, compiler = compiling.strip(model)
    while _holds_module(inner) or compiling.is_compiled(inner):
        inner = cast(nn.Module, inner.module) if _holds_module(inner) else compiling.strip(inner)[0]
    if recursive:
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                setattr(parent, name, unwrap(child))
    if not keep_fp32_wrapper:
        precision.unwrap_forward(inner)
    if keep_torch_compile and compiler is not None:
        again: nn.Module = compiler(inner)
        return again
    return inner


def _holds_module(model: Any) -> bool:
    """Whether the user's own module is the attribute ``module`` of a wrapper: DDP, DataParallel or an engine."""
    return isinstance(model, DistributedDataParallel | DataParallel) or is_engine(model)


def is_engine(model: Any) -> bool:
    """Whether ``model`` is DeepSpeed's engine."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return kind is not None and isinstance(model, kind)


def _register_comm_hook(model: DistributedDataParallel, handler: Any) -> None:
    """Register the communication hook that ``comm_hook`` and ``comm_wrapper`` select."""
    hook_name, wrapper_name = str(handler.comm_hook), str(handler.comm_wrapper)
    if hook_name == "no" and wrapper_name == "no":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[str, Any] = {
        "no": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[str, Any] = {
        "no": lambda hook: hook,
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    for field, name, known in (("comm_hook", hook_name, hooks), ("comm_wrapper", wrapper_name, wrappers)):
        if name not in known:
            raise RuntimeMisuse(
                f"DistributedDataParallelKwargs: unknown {field} {name!r} (allowed: {', '.join(known)})"
            )
    state = None
    if "power_sgd" in hook_name:
        state = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option)
    try:
        model.register_comm_hook(state, wrappers[wrapper_name](hooks[hook_name]))
    except TypeError as error:
        raise RuntimeMisuse(
            f"torch rejected DistributedDataParallelKwargs(comm_hook={hook_name!r}, comm_wrapper={wrapper_name!r}): "
            f"{error}"
        ) from error
