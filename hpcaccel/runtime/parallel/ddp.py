"""Every rank has the whole model, and gradients are averaged in the backward pass: torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.settings import Settings

__all__ = ["PreparedDDP", "wrap"]

_PACKING = ("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction", "static_graph")


class PreparedDDP(DistributedDataParallel):
    """DDP that needs the other ranks for training steps only, so that a rank may evaluate alone."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        # torch notes whether the last forward was one of training, and broadcasts buffers before the next only then.
        # A rank that has evaluated alone would leave the others waiting in that broadcast.
        noted = self.require_forward_param_sync
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_forward_param_sync = noted

    def will_sync_module_buffers(self) -> bool:
        """Buffers of rank 0 count, but only before a training step."""
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
                f"{name!r} belongs to {type(module).__name__}, which prepare() has wrapped: "
                f"accelerator.unwrap_model(model).{name}"
            ) from None


def wrap(model: nn.Module, group: Group, settings: Settings, handler: Any = None) -> nn.Module:
    """DDP around a model with something to train; other models, and any model of a lone rank, as they are.

    Args:
        handler: a ``DistributedDataParallelKwargs``, or None.

    Raises:
        RuntimeMisuse: a comm hook that does not exist, or that this hardware cannot do.
    """
    if group.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if handler is not None:
        changed = handler.to_kwargs()
        options |= {name: changed[name] for name in _PACKING if name in changed}
        options["gradient_as_bucket_view"] = handler.gradient_as_bucket_view
    if settings.deterministic:
        # After the first backward DDP rearranges its buckets in the order in which gradients came. A resumed run would
        # then sum its first steps in another order than the undisturbed one. Looking for unused parameters forbids it
        # (and makes torch say once, from C++, that it found none).
        options["find_unused_parameters"] = True
    prepared = PreparedDDP(model, device_ids=[group.device.index] if group.device.type == "cuda" else None, **options)
    if handler is not None:
        _register_comm_hook(prepared, handler)
    return prepared


def _register_comm_hook(model: DistributedDataParallel, handler: Any) -> None:
    """Pack gradients for their way, as ``comm_hook`` and ``comm_wrapper`` say."""
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
                f"DistributedDataParallelKwargs({field}={name!r}) is not known (one of: {', '.join(known)})"
            )
    state = None
    if "power_sgd" in hook_name:
        state = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option)
    try:
        model.register_comm_hook(state, wrappers[wrapper_name](hooks[hook_name]))
    except TypeError as error:
        raise RuntimeMisuse(
            f"DistributedDataParallelKwargs(comm_hook={hook_name!r}, comm_wrapper={wrapper_name!r}) does not work "
            f"here: {error}"
        ) from error
