"""fp16's scaler where gradients are spread over ranks: an overflow anywhere skips the step everywhere.

torch's own looks at gradients that are all on one mesh, and fails, or asks too few ranks, where tensor parallel leaves
some parameters whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.runtime.parallel.dtensors import is_dtensor

__all__ = ["ShardedScaler"]


class ShardedScaler(torch.amp.GradScaler):
    """torch's scaler, which asks all ranks once whether any of them has seen an overflow."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """
        Raises:
            ValueError: the gradients themselves are in fp16, as torch's own scaler raises it.
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
    """The memory that this rank has of a gradient."""
    part: torch.Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
    return part._values() if part.is_sparse else part
