"""Functions of ``accelerate.utils`` on nested tensors: shapes, slices, concatenation, devices and precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hpcaccel.runtime.distributed.collectives.nested_tensors import (
    NotATensor,
    honor_type,
    recursively_apply,
    same_mapping,
)

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_tensor_information",
    "listify",
    "send_to_device",
    "slice_tensors",
    "to_device",
]


class TensorInformation(NamedTuple):
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(value: Any) -> bool:
    return isinstance(value, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """The containers of ``data``, with a ``TensorInformation`` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The containers of ``data``, with each tensor replaced by its shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The containers of ``data_structure``, with an uninitialised tensor in place of each ``TensorInformation``."""
    if isinstance(data_structure, TensorInformation):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    if isinstance(data_structure, list | tuple):
        return honor_type(data_structure, [initialize_tensors(item) for item in data_structure])
    if isinstance(data_structure, Mapping):
        items = {key: initialize_tensors(item) for key, item in data_structure.items()}
        return same_mapping(data_structure, items)
    return data_structure


def find_batch_size(data: Any) -> int:
    """The length along dimension 0 of the first leaf, which must be a tensor.

    Raises:
        ValueError: a container is empty.
        TypeError: the first leaf is not a tensor with at least one dimension.
    """
    if isinstance(data, list | tuple | Mapping):
        if not data:
            raise ValueError(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values() if isinstance(data, Mapping) else data)))
    if not isinstance(data, torch.Tensor) or not data.ndim:
        raise TypeError(f"a batch size needs a tensor with at least one dimension, but got {type(data).__name__}")
    return int(data.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    """Like ``find_batch_size``, but returns None instead of raising an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor; None if there is no tensor."""
    if isinstance(data, torch.Tensor):
        return data.device
    if isinstance(data, list | tuple | Mapping):
        for item in data.values() if isinstance(data, Mapping) else data:
            found = find_device(item)
            if found is not None:
                return found
    return None


def listify(data: Any) -> Any:
    """The containers of ``data``, with each tensor replaced by a list of Python numbers."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """``data`` with ``tensor[tensor_slice]`` in place of each tensor. Accelerate's other arguments are ignored."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join nested values of the same structure: their tensors are concatenated along ``dim``.

    Raises:
        NotATensor: there are several values, and a leaf is not a tensor.
    """
    first = data[0]
    if isinstance(first, list | tuple):
        return honor_type(first, [concatenate([item[i] for item in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        joined = {key: concatenate([item[key] for item in data], dim) for key in first}
        return same_mapping(first, joined)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise NotATensor(f"concatenate needs tensors, but got {len(data)} values of type {type(first).__name__}")


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Move nested tensors, and objects with a ``to`` method, to ``device``. Other values are unchanged.

    Args:
        skip_keys: dictionary keys whose values are not moved.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    target = torch.device(device)
    if skipped and isinstance(tensor, Mapping):
        moved = {
            key: item if key in skipped else send_to_device(item, target, non_blocking, skipped)
            for key, item in tensor.items()
        }
        return same_mapping(tensor, moved)
    if skipped and isinstance(tensor, list | tuple):
        return honor_type(tensor, [send_to_device(item, target, non_blocking, skipped) for item in tensor])
    return to_device(tensor, target, non_blocking=non_blocking)


def to_device(value: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Move nested tensors to ``device``; containers keep their types. Other objects are moved by their ``to`` method if
    they have one."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    kind = type(value)
    if kind is dict:
        return {key: to_device(item, device, non_blocking=non_blocking) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(to_device(item, device, non_blocking=non_blocking) for item in value)
    if callable(getattr(value, "to", None)):
        return _moved_by_itself(value, device, non_blocking=non_blocking)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(to_device(item, device, non_blocking=non_blocking) for item in value))
    if isinstance(value, list | tuple):
        return kind(to_device(item, device, non_blocking=non_blocking) for item in value)
    if isinstance(value, Mapping):
        return kind({key: to_device(item, device, non_blocking=non_blocking) for key, item in value.items()})
    return value


def _moved_by_itself(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # this ``to`` does not accept non_blocking
        return value.to(device)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert fp16 and bf16 tensors to fp32; other values are returned unchanged."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda item: item.float(), tensor, test_type=lambda item: getattr(item, "dtype", None) in half
    )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that converts the function's fp16 and bf16 outputs to fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
