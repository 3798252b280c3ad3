"""Mixed precision: autocast around the forward, a scaler for fp16, outputs in fp32 so that losses outside the model
keep their precision."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.parallel.forwards import Around, put_around, take_off

__all__ = [
    "COMPUTE_DTYPES",
    "Autocasted",
    "autocast",
    "make_scaler",
    "map_tensors",
    "to_fp32",
    "unwrap_forward",
    "wrap_forward",
]

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast computes in; under fp8 all but the linear layers."""
_HALF = (torch.bfloat16, torch.float16)


def autocast(device: torch.device, mixed_precision: str, handler: Any = None) -> torch.autocast:
    """The autocast context of this precision; for ``no`` one that does nothing.

    Args:
        handler: an ``AutocastKwargs``, or None.
    """
    dtype = COMPUTE_DTYPES.get(mixed_precision)
    enabled = dtype is not None and (handler is None or handler.enabled)
    cache = None if handler is None else handler.cache_enabled
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cache)


def make_scaler(
    device: torch.device, mixed_precision: str, handler: Any = None, *, sharded: bool = False
) -> torch.amp.GradScaler | None:
    """The scaler that keeps fp16's small gradients from vanishing; None for other precisions.

    Args:
        handler: a ``GradScalerKwargs``, or None.
        sharded: gradients are spread over ranks.
    """
    if mixed_precision != "fp16":
        return None
    if device.type == "cpu":
        warnings.warn(
            "mixed_precision=fp16 on a CPU: for trying a script out only. It is slower than fp32; bf16 is less so",
            stacklevel=5,
        )
    options = {} if handler is None else handler.to_kwargs()
    if not sharded:
        return torch.amp.GradScaler(device.type, **options)
    from hpcaccel.runtime.training.sharded_scaler import ShardedScaler

    return ShardedScaler(device.type, **options)


class Autocasted(Around):
    """A forward under autocast that returns fp32."""

    def __init__(self, inner: Callable[..., Any], options: dict[str, Any], *, fp32_outputs: bool) -> None:
        super().__init__(inner)
        self.options = options
        self.fp32_outputs = fp32_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A context of its own for each call: one that is shared would not survive a model that calls itself.
        with torch.autocast(**self.options):
            outputs = self.inner(*args, **kwargs)
        return to_fp32(outputs) if self.fp32_outputs else outputs


def wrap_forward(
    model: nn.Module, device: torch.device, mixed_precision: str, *, handler: Any = None, fp32_outputs: bool = True
) -> None:
    """Make ``model`` compute under autocast and return fp32. Its class's own forward stays what it was."""
    options = {
        "device_type": device.type,
        "dtype": COMPUTE_DTYPES[mixed_precision],
        "enabled": handler is None or handler.enabled,
        "cache_enabled": None if handler is None else handler.cache_enabled,
    }
    take_off(model, Autocasted)
    put_around(model, lambda inner: Autocasted(inner, options, fp32_outputs=fp32_outputs))


def unwrap_forward(model: nn.Module) -> None:
    """The model's own forward again."""
    take_off(model, Autocasted)


def to_fp32(outputs: Any) -> Any:
    """Half-precision tensors as fp32, in nested containers; everything else as it is."""
    kind = type(outputs)
    if kind is torch.Tensor:
        return outputs.float() if outputs.dtype in _HALF else outputs
    if kind is dict:
        return {key: to_fp32(item) for key, item in outputs.items()}
    if kind is tuple:
        return tuple([to_fp32(item) for item in outputs])
    return map_tensors(outputs, _to_fp32)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def map_tensors(value: Any, function: Any) -> Any:
    """``function`` applied to every tensor in nested lists, tuples, mappings and dataclasses, whose types are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value
