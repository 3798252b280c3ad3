"""Devices of this machine, and how many bytes of a model each of them gets."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hpcaccel.core.free_memory import available_bytes
from hpcaccel.runtime.compat.introspection import compute_module_sizes, convert_file_size_to_int
from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.enums import CustomDtype
from hpcaccel.runtime.offload.mapped_tensors import OffloadError, as_dtype

__all__ = ["as_device", "default_device", "get_balanced_memory", "get_max_memory", "module_sizes"]

log = logging.getLogger(__name__)

Budget = dict[int | str, Any]
"""Bytes by device: the index of an accelerator, ``"mps"``, ``"cpu"`` or ``"disk"``."""

SPARE = 0.9
"""Part of a single accelerator's free memory that the model gets; the rest is for activations."""


def default_device() -> torch.device:
    """This machine's accelerator; the CPU if there is none."""
    kind = device_backend.accelerator()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)


def as_device(device: Any) -> torch.device:
    """The device of a name, or of the index of an accelerator.

    Raises:
        OffloadError: there is no such device.
    """
    if isinstance(device, torch.device):
        return _indexed(device)
    if isinstance(device, int) or str(device).isdecimal():
        kind = default_device().type
        if kind == "cpu":
            raise OffloadError(f"there is no device {device}: torch finds no accelerator on this machine")
        return torch.device(kind, int(device))
    try:
        return _indexed(torch.device(device))
    except RuntimeError as error:
        raise OffloadError(f"{device!r} is not a device: use an index, 'cpu' or a name such as 'cuda:0'") from error


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` as the current ``cuda:0``, so that equal devices compare as equal."""
    if device.index is not None or device.type in ("cpu", "meta", "mps"):
        return device
    return device_backend.current_device(device.type)


def get_max_memory(max_memory: Mapping[int | str, Any] | None = None) -> Budget:
    """Bytes by device, accelerators first.

    Args:
        max_memory: bytes, or sizes such as ``"10GB"``, by device. Default: the free memory of each accelerator and of
            the CPU, within the limit of the Slurm job.

    Raises:
        OffloadError: a device is not one of the allowed ones.
        RuntimeMisuse: a string is not a size.
    """
    if max_memory is None:
        return _free_memory()
    wrong = [key for key in max_memory if not isinstance(key, int) and key not in ("mps", "cpu", "disk")]
    if wrong:
        raise OffloadError(
            f"max_memory has the device {wrong[0]!r}: use the index of an accelerator, 'mps', 'cpu' or 'disk'"
        )
    accelerators = sorted(key for key in max_memory if isinstance(key, int))
    count = device_backend.device_count()
    if missing := [index for index in accelerators if not 0 <= index < count]:
        log.warning("max_memory has the devices %s, but this machine has %d accelerators", missing, count)
    order = [*accelerators, *(key for key in ("mps", "cpu", "disk") if key in max_memory)]
    return {key: _size(max_memory[key]) for key in order}


def _size(value: Any) -> Any:
    return convert_file_size_to_int(value) if isinstance(value, str) else value


def _free_memory() -> Budget:
    kind = default_device().type
    if kind == "mps":  # shares the memory of the CPU
        return {"mps": _free_cpu_memory()}
    found: Budget = {}
    if kind != "cpu" and (info := getattr(device_backend.module_of(kind), "mem_get_info", None)) is not None:
        found = {index: info(index)[0] for index in range(device_backend.device_count(kind))}
    return {**found, "cpu": _free_cpu_memory()}


def _free_cpu_memory() -> int:
    """Bytes that are free on this machine, or that its cgroup (a Slurm job, a container) leaves this process."""
    found = available_bytes()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else max(0, found)


def module_sizes(
    model: nn.Module,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    *,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Bytes of each tensor and module, by name; 0 for modules without tensors. See ``compute_module_sizes``; dtypes may
    be given by name."""
    special = {name: kind for name, one in (special_dtypes or {}).items() if (kind := _size_dtype(one)) is not None}
    found = compute_module_sizes(model, dtype=_size_dtype(dtype), special_dtypes=special, buffers_only=buffers_only)
    return defaultdict(int, {"": 0, **found})


def _size_dtype(dtype: torch.dtype | CustomDtype | str | None) -> torch.dtype | CustomDtype | None:
    return dtype if isinstance(dtype, CustomDtype) else as_dtype(dtype)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, Any] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> Budget:
    """Bytes by device with which ``infer_auto_device_map`` gives all accelerators about the same part of the model.

    Args:
        max_memory: as in ``get_max_memory``. A device with 0 bytes gets nothing.
        no_split_module_classes: names of classes whose modules are on one device.
        dtype: dtype in which the weights will be loaded.
        special_dtypes: dtypes of single tensors, by name.
        low_zero: whether accelerator 0 gets as little as possible, for programs that need its memory for other data.
    """
    given = max_memory is not None
    budget = get_max_memory(max_memory)
    used = [key for key in budget if key not in ("cpu", "disk") and budget[key] > 0]
    if not used:
        return budget
    if len(used) == 1:
        low_zero = False
        if not given and used[0] != "mps":
            budget[used[0]] = budget[used[0]] * SPARE
    sizes = module_sizes(model, dtype, special_dtypes)
    each = sizes[""] // (len(used) - 1 if low_zero else len(used)) + _slack(model, sizes, no_split_module_classes)
    indices = sorted(key for key in used if isinstance(key, int))
    for key in indices[:-1]:  # the last one keeps all, so that nothing is offloaded by a rounding error
        budget[key] = min(budget[0] if low_zero and key == 0 else each, budget[key])
    if low_zero:
        rest = sizes[""] - sum(budget.get(index, 0) for index in range(1, len(used)))
        budget[0] = min(max(0, rest), budget[0])
    return budget


def _slack(model: nn.Module, sizes: Mapping[str, float], whole: Collection[str] | str | None) -> int:
    """Bytes added to each accelerator's even share, since modules are not split: 1.25 times the largest module that
    must not be split, or the mean size of the innermost modules."""
    classes = {whole} if isinstance(whole, str) else set(whole or ())
    first: dict[str, float] = {}
    for name, module in model.named_modules():
        if name and type(module).__name__ in classes:
            first.setdefault(type(module).__name__, sizes.get(name, 0))
    tensors = _leaves(sizes)
    inner = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = _leaves(inner)
    mean = int(sum(inner[name] for name in leaves) / max(len(leaves), 1))
    return int(1.25 * max(max(first.values(), default=0), mean))


def _leaves(sizes: Mapping[str, float]) -> set[str]:
    parents = {name.rpartition(".")[0] for name in sizes if "." in name}
    return {name for name in sizes if name and name not in parents}
