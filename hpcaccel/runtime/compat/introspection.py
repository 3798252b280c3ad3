"""Inspection of models and objects: sizes in bytes, tied parameters, compiled parts, names."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import SIZE_ADVICE, parse_size
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import CustomDtype

__all__ = [
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "convert_bytes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "id_tensor_storage",
    "is_compiled_module",
    "is_peft_model",
    "merge_dicts",
    "model_has_dtensor",
    "named_module_tensors",
    "recursive_getattr",
    "retie_parameters",
]


def convert_file_size_to_int(size: int | str) -> int:
    """Number of bytes in a size: ``"5GB"`` uses powers of 1,000, ``"5GiB"`` powers of 1,024; ``"5Gb"`` is in bits.

    Raises:
        RuntimeMisuse: the text is not a size.
    """
    if isinstance(size, int):
        return size
    found = parse_size(size)
    if found is None:
        raise RuntimeMisuse(f"{size!r} is not a size: {SIZE_ADVICE}")
    return found


def convert_bytes(size: float) -> str:
    """A size in bytes as text, in powers of 1,024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one element; a bool counts as one bit."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs (name, tensor) of a module: parameters, then buffers.

    Args:
        remove_non_persistent: leave out buffers that are not in the state_dict.
    """
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
    dtype: torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Size in bytes of each tensor and module, by name; ``""`` is the whole model.

    Args:
        dtype: count elements of floating-point tensors as no larger than those of this dtype.
        special_dtypes: dtypes to assume for single tensors, by tensor name.
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
    """Returns the model's size in bytes, and a pair: the size of its largest layer, and the names of all layers of that
    size.

    A layer is a module that cannot be split: it has no children, or its class is in the model's ``_no_split_modules``.
    A tensor that belongs directly to a module that is not a layer counts as a layer, too.
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
    """Identifies a tensor's storage. Returns its device, its address and its size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """For each parameter with several names, the sorted list of these names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Tie the parameters of each group again: all names get the group's first parameter that is not on the meta
    device."""
    for group in tied_params:
        held = [model.get_parameter(name) for name in group]
        real = next((parameter for parameter in held if parameter.device.type != "meta"), None)
        if real is not None:
            for name, parameter in zip(group, held, strict=True):
                owner, _, last = name.rpartition(".")
                if parameter is not real:
                    setattr(model.get_submodule(owner), last, real)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, children before their parents; with ``return_fqns`` as pairs ``(name, module)``."""
    named = list(_bottom_up("", model))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def is_compiled_module(module: nn.Module) -> bool:
    """Whether this module was created by ``torch.compile``."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported if anything was compiled
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether this module, or a module inside it, was created by ``torch.compile``."""
    return bool(module._modules) and any(is_compiled_module(part) for part in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor, as in a sharded model."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(item, tensor.DTensor) for item in model.parameters())


def is_peft_model(model: nn.Module) -> bool:
    """Whether the unwrapped model is a ``peft.PeftModel``."""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    from hpcaccel.runtime.parallel.ddp import unwrap

    return isinstance(unwrap(model), peft.PeftModel)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """``obj.a.b.c`` for ``"a.b.c"``."""
    return reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Update ``destination`` in place with ``source``, at every depth, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def get_pretty_name(obj: Any) -> str:
    """The name of a class or a function; for other objects, the name of their class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)
