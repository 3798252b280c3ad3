"""How large models are, in bytes, and sizes for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import SIZE_WORDS, parse_size
from hpcaccel.errors import RuntimeMisuse

__all__ = [
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "convert_bytes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "id_tensor_storage",
    "named_module_tensors",
]


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of ``"5GB"`` (powers of 1,000), ``"5GiB"`` (of 1,024); ``"5Gb"`` are bits.

    Raises:
        RuntimeMisuse: it is no size.
    """
    if isinstance(size, int):
        return size
    found = parse_size(size)
    if found is None:
        raise RuntimeMisuse(f"{size!r} is not a size: {SIZE_WORDS}")
    return found


def convert_bytes(size: float) -> str:
    """A size for people, in powers of 1,024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Bytes of one element; a bool counts as the bit that it holds."""
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names; on request without buffers that a state_dict leaves out."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        for name, buffer in module.named_buffers(recurse=recurse):
            if not (remove_non_persistent and _is_left_out(module, name)):
                yield name, buffer


def _is_left_out(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last in module.get_submodule(owner)._non_persistent_buffers_set


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Bytes of each tensor and of each module by name; ``""`` is the whole model.

    Args:
        dtype: count floating-point tensors as if they were no wider than this.
        special_dtypes: by a tensor's name, which one it would have.
    """
    sizes: defaultdict[str, float] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        each = dtype_byte_size(tensor.dtype)
        if special_dtypes and name in special_dtypes:
            each = dtype_byte_size(special_dtypes[name])
        elif dtype is not None and tensor.dtype.is_floating_point:
            each = min(each, dtype_byte_size(dtype))
        parts = name.split(".")
        for length in range(len(parts) + 1):
            sizes[".".join(parts[:length])] += tensor.numel() * each
    return dict(sizes)


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Bytes of the model, and those of its largest layer with the names of the layers that are so large.

    A layer is a module that cannot be split: one without children, or of a class in the model's
    ``_no_split_modules``.
    """
    sizes = compute_module_sizes(model)
    whole = set(getattr(model, "_no_split_modules", None) or [])
    layers: dict[str, float] = {}
    _collect(model, "", whole, sizes, layers)
    largest = max(layers.values(), default=0)
    return sizes.get("", 0), (largest, [name for name, size in layers.items() if size == largest])


def _collect(
    module: nn.Module, prefix: str, whole: set[str], sizes: Mapping[str, float], layers: dict[str, float]
) -> None:
    dot = f"{prefix}." if prefix else ""
    for name, _ in named_module_tensors(module):
        layers[dot + name] = sizes[dot + name]
    for name, child in module.named_children():
        if type(child).__name__ in whole or not list(child.children()):
            layers[dot + name] = sizes.get(dot + name, 0)
        else:
            _collect(child, dot + name, whole, sizes, layers)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[Any, int, int]:
    """What tells two tensors of the same memory: device, address and bytes of their storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
