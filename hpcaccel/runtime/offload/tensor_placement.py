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
from hpcaccel.runtime.offload.weight_store import load_offloaded_weight

__all__ = ["TiedTensors", "get_non_persistent_buffers", "like", "load_offloaded_weights", "set_module_tensor_to_device"]

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
    """Move a parameter or a buffer of a module, and optionally set its value. The module gets a new tensor.

    Args:
        tensor_name: name below ``module``, such as ``"block.0.weight"``.
        device: a device, its name, or the index of an accelerator.
        value: new value, of the same shape; needed if the tensor is on the meta device.
        dtype: dtype of a floating-point ``value``; default: the tensor's present dtype.
        fp16_statistics: must be None; bitsandbytes is not supported.
        tied_params_map: tied tensors; if one is on the device already, the module gets that one.
        non_blocking: whether copies are asynchronous, where the device can do this.
        clear_cache: whether to release the memory that torch has cached on the device.

    Raises:
        OffloadError: the module has no such tensor; the tensor is on the meta device, and there is no value; shapes
            differ; ``fp16_statistics`` is given.
    """
    if fp16_statistics is not None:
        raise OffloadError("fp16_statistics belong to 8-bit weights of bitsandbytes, which hpcaccel does not support")
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    slots: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    present = slots.get(name)
    if present is None:
        raise OffloadError(f"{type(owner).__name__} has no parameter and no buffer {tensor_name!r}")
    target = as_device(device)
    tied = _tied(tied_params_map, value, present)
    if tied is not None and target in tied:
        slots[name] = tied[target]
        return
    if present.is_meta and target.type != "meta" and value is None:
        raise OffloadError(f"{tensor_name} is on the meta device: pass the value that it gets on {target}")
    with torch.no_grad():
        if value is None:
            cast = as_dtype(dtype) if target.type == "meta" and present.is_floating_point() else None
            new = present.to(target, cast or present.dtype, non_blocking=non_blocking)
        else:
            if present.shape != value.shape:
                raise OffloadError(
                    f"{tensor_name} has the shape {tuple(present.shape)}, and its new value {tuple(value.shape)}"
                )
            is_float = value.is_floating_point() or value.is_complex()
            cast = present.dtype if dtype is None else as_dtype(dtype) if is_float else None
            new = value.detach().to(target, cast or value.dtype, non_blocking=non_blocking)
        if new is not present:
            slots[name] = like(present, new)
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    if tied is not None:
        tied[target] = slots[name]


def _tied(
    ties: TiedTensors | None, value: torch.Tensor | None, present: torch.Tensor
) -> dict[torch.device, torch.Tensor] | None:
    tensors = [one for one in (value, present) if one is not None and not one.is_meta]
    return next((ties[one.data_ptr()] for one in tensors if one.data_ptr() in ties), None) if ties else None


def like(present: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` as a parameter with the attributes of ``present``, if that is a parameter."""
    if not isinstance(present, nn.Parameter):
        return new
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
