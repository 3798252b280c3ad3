"""Mixed precision: autocast around the forward, a scaler for fp16, outputs in fp32 so that losses outside the model
keep their precision."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["COMPUTE_DTYPES", "autocast", "make_scaler", "map_tensors", "wrap_forward"]

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, mixed_precision: str) -> torch.autocast:
    """The autocast context of this precision; for ``no`` one that does nothing."""
    dtype = COMPUTE_DTYPES.get(mixed_precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(device: torch.device, mixed_precision: str) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler(device.type) if mixed_precision == "fp16" else None


def wrap_forward(model: nn.Module, device: torch.device, mixed_precision: str) -> None:
    """Make ``model`` compute under autocast and return fp32. Its class's own forward stays what it was."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with autocast(device, mixed_precision):
            outputs = inner(*args, **kwargs)
        return map_tensors(outputs, _to_fp32)

    model.forward = forward


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def map_tensors(value: Any, function: Any) -> Any:
    """``function`` applied to every tensor in nested lists, tuples and mappings, whose types are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    return value
