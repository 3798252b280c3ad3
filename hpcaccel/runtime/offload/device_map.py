"""Device maps: which device, or the disk, holds which part of a model."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.runtime.compat.introspection import find_tied_parameters
from hpcaccel.runtime.enums import CustomDtype
from hpcaccel.runtime.offload.device_memory import get_balanced_memory, get_max_memory, module_sizes
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.model_parts import (
    Part,
    check_tied_parameters_in_config,
    compute_module_total_buffer_size,
    fallback_allocate,
    get_max_layer_size,
    get_module_size_with_ties,
    split_part,
    ties_outside,
)

__all__ = ["clean_device_map", "infer_auto_device_map", "resolve_device_map"]

log = logging.getLogger(__name__)

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


class _Allocation:
    """Gives the parts of a model to devices, in order; a part that fits nowhere goes to the disk."""

    def __init__(self, model: nn.Module, budget: Mapping[int | str, Any], whole: Collection[str], sizes: Any) -> None:
        self.devices = [*budget, *(["disk"] if "disk" not in budget else [])]
        self.budget = {**budget, "disk": None}
        self.whole = whole
        self.sizes: Mapping[str, float] = sizes
        self.ties = find_tied_parameters(model)
        self.used: dict[int | str, float] = dict.fromkeys(self.devices, 0)
        self.map: OrderedDict[str, Any] = OrderedDict()
        self.modules: dict[str, Any] = {}
        self.needed: dict[int | str, float] = {}
        self.waiting: list[Part] = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        self.largest, self.largest_names = get_max_layer_size(self.waiting, sizes, whole)
        accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        self.reserving = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        """Devices that keep room for the largest layer that is offloaded."""

    def run(self, *, fallback: bool) -> None:
        at = 0
        while self.waiting:
            name, part = self.waiting.pop(0)
            self.largest_names = [one for one in self.largest_names if one != name and not one.startswith(f"{name}.")]
            if not self.largest_names:
                self._find_largest()
            device = self.devices[at]
            if self._placed(name, part, device) or self._divided(name, part, device):
                continue
            if fallback and device != "disk" and not self.used[device] and self._filled(name, part, device):
                continue
            reserved = self._reserved(device)
            if not self.used[device]:
                self.needed[device] = self._with_ties(name)[0] + reserved
            self.used[device] += reserved
            at += 1
            self.waiting.insert(0, (name, part))

    def _find_largest(self) -> None:
        modules = [part for part in self.waiting if isinstance(part[1], nn.Module)]
        self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.whole)

    def _reserved(self, device: int | str) -> float:
        return self.largest if device in self.reserving else 0

    def _left(self, device: int | str) -> float:
        limit = self.budget[device]
        return float("inf") if limit is None else limit - self._reserved(device) - self.used[device]

    def _with_ties(self, name: str) -> tuple[float, list[str], list[Any]]:
        return get_module_size_with_ties(ties_outside(name, self.ties), self.sizes[name], self.sizes, self.waiting)

    def _placed(self, name: str, part: Any, device: int | str) -> bool:
        """Put a part and those it is tied to on a device, if all of them fit."""
        size, tied, _ = self._with_ties(name)
        if size > self._left(device):
            return False
        log.debug("%s (%d bytes)%s on %s", name, size, f" with {tied}" if tied else "", device)
        self.used[device] += size
        self.modules[name] = part
        for one in (name, *tied):
            self.map[one] = device
        self.waiting = [one for one in self.waiting if one[0] not in tied]
        return True

    def _divided(self, name: str, part: Any, device: int | str) -> bool:
        """Split a part, or one that it is tied to, if that may help."""
        left, (_, names, parts) = self._left(device), self._with_ties(name)
        if self.sizes[name] <= left:
            for other, module in zip(names, parts, strict=True):
                if pieces := split_part(other, module, self.whole):
                    at = next(at for at, (one, _) in enumerate(self.waiting) if one == other)
                    self.waiting[at : at + 1] = pieces
                    self.waiting.insert(0, (name, part))
                    self._find_largest()
                    return True
        if self.sizes[name] >= left and (pieces := split_part(name, part, self.whole)):
            self.waiting[:0] = pieces
            self._find_largest()
            return True
        return False

    def _filled(self, name: str, part: Any, device: int | str) -> bool:
        """Let a later part that fits on the empty device go first."""
        limit = self.budget[device] - max(self.largest, self._with_ties(name)[0])
        found, other, rest = fallback_allocate(self.waiting, self.sizes, limit, self.whole, self.ties)
        if found is None:
            return False
        self.waiting = [(found, other), (name, part), *rest]
        return True


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, Any] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Any]:
    """A device map that fills the accelerators in order, then CPU memory, then the disk. The first accelerator and CPU
    memory keep room for the largest layer that they hold temporarily. The model may be on the meta device.

    Args:
        max_memory: as in ``get_max_memory``.
        no_split_module_classes: names of classes whose modules are on one device, such as those of blocks with a
            residual connection.
        dtype: dtype in which the weights will be loaded.
        special_dtypes: dtypes of single tensors, by name.
        verbose: whether to print the device of each part.
        clean_result: whether the entries of a module whose parts are all on one device are merged into one.
        offload_buffers: whether buffers of offloaded modules will be offloaded, too.
        fallback_allocation: whether a device on which the next module does not fit gets a later, smaller one.

    Returns:
        The device of each module, or the device of each tensor where a module is split.

    Raises:
        OffloadError: ``max_memory`` has an unknown device.
    """
    given = no_split_module_classes or ()
    whole = {given} if isinstance(given, str) else set(given)
    budget = get_max_memory(max_memory)
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        log.warning(
            "the configuration of %s ties weights, but they are not tied: call tie_weights() first",
            type(model).__name__,
        )
    found = _Allocation(model, budget, whole, module_sizes(model, dtype, special_dtypes))
    found.run(fallback=fallback_allocation)
    if verbose:
        print("\n".join(f"{name}: {device}" for name, device in found.map.items()))
    if not offload_buffers:
        _warn_of_buffers(found, dtype, special_dtypes)
    if found.needed:
        needs = ", ".join(f"{device}: {size:.0f} bytes" for device, size in found.needed.items())
        log.info("devices that get no modules because their memory is too small, with the memory needed: %s", needs)
    return OrderedDict(clean_device_map(found.map)) if clean_result else found.map


def _warn_of_buffers(found: _Allocation, dtype: Any, special_dtypes: Any) -> None:
    """Warn if the buffers of offloaded modules, which stay on an accelerator, fit on none."""
    size = sum(
        compute_module_total_buffer_size(part, dtype, special_dtypes)
        for name, part in found.modules.items()
        if isinstance(part, nn.Module) and found.map[name] in ("cpu", "disk")
    )
    accelerators = [device for device in found.devices if device not in ("cpu", "disk")]
    if size and accelerators and not any(found.budget[one] >= size + found.used[one] for one in accelerators):
        warnings.warn(
            f"the buffers of offloaded modules take {size:.0f} bytes, too many for any of the devices "
            f"{shortened(accelerators, 8)}: pass offload_buffers=True",
            stacklevel=3,
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge the entries of a module whose parts are all on the same device, in place.

    Args:
        module_name: only parts of this module.

    Returns:
        ``device_map``.
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
    depth = module_name.count(".") + 2 if module_name else 1
    below = [name for name in device_map if name.startswith(prefix) and len(name) > len(module_name)]
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in below):
        clean_device_map(device_map, child)
    return device_map


def resolve_device_map(
    model: nn.Module,
    device_map: Mapping[str, Any] | str,
    *,
    max_memory: Mapping[int | str, Any] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
) -> dict[str, Any]:
    """A device map that was given, or one computed for ``auto``, ``balanced``, ``balanced_low_0`` or ``sequential``.

    Args:
        no_split_module_classes: default: the model's own ``_no_split_modules``.
        special_dtypes: dtypes of single tensors, by name, for a computed map.

    Raises:
        OffloadError: ``device_map`` is any other string.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in STRATEGIES:
        raise OffloadError(f"device_map={device_map!r}: use {', '.join(map(repr, STRATEGIES))} or a dict of devices")
    if no_split_module_classes is None:
        no_split_module_classes = list(getattr(model, "_no_split_modules", None) or ())
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero=low_zero
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )
