"""Collectives over nested containers of tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.precision import map_tensors
from hpcaccel.runtime.process_group import Group

__all__ = ["gather", "reduce", "to_device"]


def to_device(value: Any, device: torch.device) -> Any:
    """Nested tensors on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def gather(value: Any, group: Group) -> Any:
    """All ranks' tensors, concatenated along dimension 0 in rank order, on every rank. A scalar becomes one element.

    Shapes must be the same on every rank.
    """
    return map_tensors(value, lambda tensor: _gather(tensor, group))


def _gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    tensor = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
    if group.world_size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.world_size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def reduce(value: Any, group: Group, *, reduction: str, scale: float = 1.0) -> Any:
    """The sum or the mean over all ranks of each tensor, times ``scale``, on every rank.

    Raises:
        RuntimeMisuse: a reduction other than ``sum``, ``mean`` and ``none``.
    """
    if reduction not in ("sum", "mean", "none"):
        raise RuntimeMisuse(f"reduction={reduction!r} is not known (one of: sum, mean, none)")
    return map_tensors(value, lambda tensor: _reduce(tensor, group, reduction=reduction, scale=scale))


def _reduce(tensor: torch.Tensor, group: Group, *, reduction: str, scale: float) -> torch.Tensor:
    result = tensor.detach().clone()
    if group.world_size > 1 and reduction != "none":
        dist.all_reduce(result)
        if reduction == "mean":
            result = result / group.world_size
    return result * scale if scale != 1.0 else result
