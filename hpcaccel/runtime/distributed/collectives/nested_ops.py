"""Looking into nested tensors, cutting, joining and converting them: what scripts know from ``accelerate.utils``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hpcaccel.runtime.data import placement
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
]


class TensorInformation(NamedTuple):
    """What is needed to make a tensor like another one."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(value: Any) -> bool:
    return isinstance(value, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """The same containers with a ``TensorInformation`` for each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The same containers with each tensor's shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialised tensors in place of each ``TensorInformation``."""
    if isinstance(data_structure, TensorInformation):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    if isinstance(data_structure, list | tuple):
        return honor_type(data_structure, [initialize_tensors(item) for item in data_structure])
    if isinstance(data_structure, Mapping):
        items = {key: initialize_tensors(item) for key, item in data_structure.items()}
        return same_mapping(data_structure, items)
    return data_structure


def find_batch_size(data: Any) -> int:
    """The length along dimension 0 of the first tensor.

    Raises:
        ValueError: an empty container.
        TypeError: the first leaf is no tensor with a dimension.
    """
    if isinstance(data, list | tuple | Mapping):
        if not data:
            raise ValueError(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values() if isinstance(data, Mapping) else data)))
    if not isinstance(data, torch.Tensor) or not data.ndim:
        raise TypeError(f"the batch size is that of a tensor with at least one dimension, not of {type(data).__name__}")
    return int(data.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    """``find_batch_size``, or None where there is none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Where the first tensor is; None where there is no tensor."""
    if isinstance(data, torch.Tensor):
        return data.device
    if isinstance(data, list | tuple | Mapping):
        for item in data.values() if isinstance(data, Mapping) else data:
            found = find_device(item)
            if found is not None:
                return found
    return None


def listify(data: Any) -> Any:
    """Plain Python numbers, in lists, in place of tensors."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """``tensor[tensor_slice]`` in place of each tensor; the ranks, which Accelerate's callers name, do not matter."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """One nested value out of several alike, with their tensors joined along ``dim``.

    Raises:
        NotATensor: something else than tensors, and more than one of it.
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
    raise NotATensor(f"concatenate joins tensors, and got {len(data)} of {type(first).__name__}")


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Nested tensors, and objects with a ``to`` of their own, on ``device``.

    Args:
        skip_keys: of the dictionary itself, whose values stay where they are.
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
    return placement.to_device(tensor, target, non_blocking=non_blocking)


def convert_to_fp32(tensor: Any) -> Any:
    """fp16 and bf16 tensors as fp32; everything else as it is."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda item: item.float(), tensor, test_type=lambda item: getattr(item, "dtype", None) in half
    )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function's fp16 and bf16 outputs as fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
