"""Gradient scaling for fp16, with any number of optimizers, and with gradients that are sharded over ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.enums import DistributedType

__all__ = ["Scaling", "ShardedScaler", "get_grad_scaler", "make_scaler"]


class Scaling:
    """Calls torch's GradScaler for scripts that do not call it themselves.

    torch requires one call of ``update`` per iteration, after all optimizers have stepped, because ``update`` resets
    the record of unscaled gradients. The call is delayed until all optimizers with unscaled gradients have stepped, but
    at the latest until the next backward pass.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._backwards = 0
        self._unscaled: dict[int, int] = {}
        """Number of the backward pass, for each optimizer (by id) with unscaled gradients that has not stepped yet."""
        self._update_due = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        if self._update_due:
            self._update()
        self._backwards += 1
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale this optimizer's gradients, once per backward pass."""
        at = self._unscaled.get(id(optimizer))
        if at == self._backwards:
            return
        if at is not None:
            self._update()  # the script skipped a step, and these are new gradients
        self.scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = self._backwards

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool | torch.Tensor]:
        """Step unless gradients have overflowed.

        Returns:
            The result of the step, and whether the step was skipped. For most optimizers the second value is a bool:
            torch's scaler reads from the device whether gradients have overflowed, and calls the optimizer only if they
            have not. A fused optimizer is always called and decides on the device; the second value is then a tensor on
            the device.

        Raises:
            RuntimeMisuse: a closure is given: it would compute new, scaled gradients after the check for overflows.
        """
        if closure is not None:
            raise RuntimeMisuse(
                f"{type(optimizer).__name__}.step(closure) with mixed_precision=fp16: gradients computed by a closure "
                "are not unscaled. Use bf16, or an optimizer that needs no closure"
            )
        own, inner = optimizer.__dict__.get("step"), optimizer.step
        skipped: bool | torch.Tensor = True

        def recording_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal skipped
            found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
            skipped = False if found is None else found.detach().clone()
            return inner(*args, **kwargs)

        optimizer.step = recording_step  # type: ignore[method-assign]
        try:
            result = self.scaler.step(optimizer)
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]
        self._unscaled.pop(id(optimizer), None)
        self._update_due = True
        if not self._unscaled:
            self._update()
        return result, skipped

    def norm_of_scaled(self, norm: torch.Tensor) -> torch.Tensor:
        """Convert the norm of scaled gradients to the norm of unscaled gradients."""
        return norm / self.scaler.scale(torch.ones_like(norm))

    def _update(self) -> None:
        self.scaler.update()
        self._update_due = False
        self._unscaled.clear()


def make_scaler(
    device: torch.device, mixed_precision: str, handler: Any = None, *, sharded: bool = False
) -> torch.amp.GradScaler | None:
    """The gradient scaler for fp16; None for other precisions.

    Args:
        handler: a ``GradScalerKwargs``, or None.
        sharded: whether gradients are sharded over ranks.

    Raises:
        RuntimeMisuse: the device is an XLA device.
    """
    if mixed_precision != "fp16":
        return None
    if device.type == "cpu":
        warnings.warn(
            "mixed_precision=fp16 on a CPU is only for testing scripts: it is slower than fp32 and bf16",
            stacklevel=5,
        )
    options = {} if handler is None else handler.to_kwargs()
    return _scaler_of(device.type, sharded=sharded, **options)


def _scaler_of(kind: str, *, sharded: bool, **options: Any) -> torch.amp.GradScaler:
    if kind == "xla":
        raise RuntimeMisuse("mixed_precision=fp16 on an XLA device: TPUs have no fp16 units. Use bf16")
    return (ShardedScaler if sharded else torch.amp.GradScaler)(kind, **options)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A new gradient scaler for this machine's kind of device, for loops without an Accelerator. Without an
    accelerator, torch warns and disables it.

    Args:
        distributed_type: with FSDP, the scaler reduces overflows over all ranks.
        kwargs: arguments of torch's scaler, such as ``init_scale``.

    Raises:
        RuntimeMisuse: the devices are XLA devices.
    """
    kind = device_backend.accelerator()
    return _scaler_of("cuda" if kind == "cpu" else kind, sharded=distributed_type == DistributedType.FSDP, **kwargs)


class ShardedScaler(torch.amp.GradScaler):
    """torch's scaler with one reduction over all ranks: if gradients overflow on any rank, all ranks skip the step.

    torch's own scaler requires all gradients on one mesh. It fails, or reduces over too few ranks, if tensor
    parallelism leaves some parameters unsharded.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients, and record overflows of all ranks.

        Raises:
            ValueError: the gradients are in fp16; torch's scaler raises the same error.
        """
        parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = _own_part(parameter.grad)
                    if part.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    parts[part.device, part.dtype].append(part)
        seen = found_inf.clone()
        with torch.no_grad():
            for (device, _), tensors in parts.items():
                found = found_inf.to(device, copy=True)
                torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inv_scale.to(device))
                seen = torch.maximum(seen, found.to(seen.device))
        if dist.is_initialized():
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        devices = {device for device, _ in parts} or {seen.device}
        return {device: seen.to(device) for device in devices}


def _own_part(gradient: Any) -> torch.Tensor:
    """This rank's shard of a gradient; the whole gradient if it is not sharded."""
    part: torch.Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
    return part._values() if part.is_sparse else part
