"""Moving single tensors of a module between devices."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.compat.out_of_memory import clear_device_cache
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.mapped_tensors import OffloadError, as_dtype
from hpcaccel.runtime.offload.quantized_tensors import (
    bits_of,
    forget_state,
    like_quantized,
    original_shape,
    place_quantized,
    scales_in,
)
from hpcaccel.runtime.offload.weight_store import load_offloaded_weight

__all__ = [
    "TiedTensors",
    "clear_cache_of",
    "get_non_persistent_buffers",
    "like",
    "load_offloaded_weights",
    "set_module_tensor_to_device",
]

TiedTensors = dict[Hashable, dict[torch.device, torch.Tensor]]
"""For each tied tensor, what is on the devices now. The key is the address of the tensor's data, or any other key."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or a buffer of a module, or set its value. A weight of bitsandbytes is quantised on the device.

    Args:
        tensor_name: name below ``module``, such as ``"block.0.weight"``.
        device: a device, its name, or the index of an accelerator.
        value: new value, of the same shape; needed if the tensor is on the meta device. For a weight of bitsandbytes it
            may be quantised already: in 8 bits, with ``fp16_statistics``, or in 4 bits, as the weight's own were.
        dtype: dtype of a floating-point ``value``; default: the tensor's present dtype.
        fp16_statistics: the scales of an 8-bit ``value`` of bitsandbytes, one number per row.
        tied_params_map: tied tensors; if one is on the device already, the module gets that one.
        non_blocking: whether copies are asynchronous, where the device can do this.
        clear_cache: whether to release the memory that torch has cached on the device. This waits for the device: a
            caller that moves many tensors passes False, and calls ``clear_cache_of`` once at the end.

    Raises:
        OffloadError: the module has no such tensor; the tensor is on the meta device, and there is no value; shapes
            differ; ``fp16_statistics`` are given for another tensor than an 8-bit weight, or missing for one.
    """
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    slots: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    present = slots.get(name)
    if present is None:
        raise OffloadError(f"{type(owner).__name__} has no parameter and no buffer {tensor_name!r}")
    target = as_device(device)
    if fp16_statistics is not None and bits_of(present) != 8:
        raise OffloadError(f"{tensor_name} is not an 8-bit weight of bitsandbytes: omit fp16_statistics")
    tied = _tied(tied_params_map, value, present)
    if tied is not None and target in tied:
        slots[name] = tied[target]
        return
    if present.is_meta and target.type != "meta" and value is None:
        raise OffloadError(f"{tensor_name} is on the meta device: pass the value that it gets on {target}")
    if value is not None and value.shape not in (present.shape, original_shape(present)):
        shapes = f"has the shape {tuple(present.shape)}, and its new value {tuple(value.shape)}"
        raise OffloadError(f"{tensor_name} {shapes}")
    with torch.no_grad():
        if bits_of(present):
            scales = scales_in(owner).get("SCB") if value is None else fp16_statistics
            new = place_quantized(present, target, value, dtype=as_dtype(dtype), scales=scales)
            if new is not present:
                forget_state(owner)
        else:
            new = _placed(present, target, value, dtype, non_blocking=non_blocking)
        slots[name] = new
    if clear_cache:
        clear_cache_of(target)
    if tied is not None:
        tied[target] = new


def _placed(
    present: torch.Tensor,
    target: torch.device,
    value: torch.Tensor | None,
    dtype: torch.dtype | str | None,
    *,
    non_blocking: bool,
) -> torch.Tensor:
    """The tensor that replaces ``present`` in a module; arguments as in ``set_module_tensor_to_device``."""
    if value is None:
        cast = as_dtype(dtype) if target.type == "meta" and present.is_floating_point() else None
        new = present.to(target, cast or present.dtype, non_blocking=non_blocking)
    else:
        is_float = value.is_floating_point() or value.is_complex()
        cast = present.dtype if dtype is None else as_dtype(dtype) if is_float else None
        new = value.detach().to(target, cast or value.dtype, non_blocking=non_blocking)
    return present if new is present else like(present, new)


def clear_cache_of(*devices: Any) -> None:
    """Release the memory that torch has cached, if any of the devices is an accelerator.

    Args:
        devices: devices, their names, indices of accelerators, ``"disk"`` or None.
    """
    if any(str(device).partition(":")[0] not in ("cpu", "meta", "disk", "None") for device in devices):
        clear_device_cache()


def _tied(
    ties: TiedTensors | None, value: torch.Tensor | None, present: torch.Tensor
) -> dict[torch.device, torch.Tensor] | None:
    tensors = [one for one in (value, present) if one is not None and not one.is_meta]
    return next((ties[one.data_ptr()] for one in tensors if one.data_ptr() in ties), None) if ties else None


def like(present: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` as a parameter with the attributes of ``present``, if that is a parameter."""
    if not isinstance(present, nn.Parameter):
        return new
    if bits_of(present):
        return like_quantized(present, new)  # type: ignore[no-any-return]
    grad = present.requires_grad and (new.is_floating_point() or new.is_complex())
    kind = type(present) if issubclass(type(present), nn.Parameter) else nn.Parameter
    made = kind(new, requires_grad=grad)
    made.__dict__.update(present.__dict__)
    return made


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that are not in the state dict.

    Args:
        recurse: whether to include the buffers of submodules.
        fqns: whether to return full names, such as ``"block.0.mask"``, instead of ``"mask"``.
    """
    parts = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, part in parts
        for name in part._non_persistent_buffers_set
    }


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load weights from a folder into a model, in CPU memory.

    Args:
        index: the entries of the weights to load.
    """
    for name, entry in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value=value.clone())
