"""Attaching ``AlignDevicesHook`` to the modules of a model: to each with weights, or by the blocks of a device map."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.compat.introspection import named_module_tensors
from hpcaccel.runtime.offload.aligned_devices import AlignDevicesHook
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.model_parts import part_of
from hpcaccel.runtime.offload.module_hooks import GUARDED, add_hook_to_module, is_offloaded
from hpcaccel.runtime.offload.read_ahead import ReadAhead
from hpcaccel.runtime.offload.tensor_placement import TiedTensors, clear_cache_of
from hpcaccel.runtime.offload.weight_store import PrefixedDataset

__all__ = [
    "Attachment",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "guard_moves",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attachment:
    """Arguments shared by all hooks of one model."""

    weights_map: Mapping[str, torch.Tensor] | None = None
    offload_buffers: bool = False
    skip_keys: str | Sequence[str] | None = None
    preload_module_classes: Collection[str] = ()
    tied_params_map: TiedTensors | None = None
    tie_keys: Mapping[str, Hashable] = field(default_factory=dict)
    """Keys in ``tied_params_map`` of offloaded tensors, by the tensors' names in the model."""
    read_ahead: ReadAhead = field(default_factory=ReadAhead)

    def hook(self, execution_device: Any, *, offload: bool = False, name: str = "", **options: Any) -> AlignDevicesHook:
        """A hook for the module ``name``."""
        prefix = f"{name}." if name else ""
        made = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=PrefixedDataset(self.weights_map, prefix) if offload and self.weights_map is not None else None,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
            **options,
        )
        if offload:
            made.ties = {key.removeprefix(prefix): tie for key, tie in self.tie_keys.items() if key.startswith(prefix)}
            made.read_ahead = self.read_ahead
            self.read_ahead.register(made)
        made.clears_cache = False
        return made

    def align(
        self, module: nn.Module, execution_device: Any, name: str, *, offload: bool, io_same_device: bool = False
    ) -> None:
        """Attach a hook to each module inside ``module`` that has tensors of its own."""
        whole = offload and type(module).__name__ in self.preload_module_classes
        if whole or any(True for _ in named_module_tensors(module)):
            options = {"place_submodules": whole, "io_same_device": io_same_device}
            hook = self.hook(execution_device, offload=offload, name=name, **options)
            add_hook_to_module(module, hook, append=True)
        if not whole:
            for child_name, child in module.named_children():
                self.align(child, execution_device, _below(name, child_name), offload=offload)

    def execute(self, module: nn.Module, execution_device: Any) -> None:
        """Attach a hook that moves inputs and weights to the device to each module without one."""
        if not hasattr(module, "_hf_hook") and any(True for _ in module.state_dict()):
            add_hook_to_module(module, self.hook(execution_device))
        if type(module).__name__ not in self.preload_module_classes:
            for child in module.children():
                self.execute(child, execution_device)

    def align_blocks(
        self, module: nn.Module, devices: Mapping[str, Any], offload: Mapping[str, bool], name: str
    ) -> None:
        """Attach hooks to the modules of a device map, and to the whole model."""
        prefix = f"{name}." if name else ""
        place = part_of(name, offload)
        if place is not None and not any(key != name and key.startswith(prefix) for key in offload):
            self._align_block(module, devices[place], name, offload=offload[place])
            return
        own = [one for key, _ in named_module_tensors(module) if (one := part_of(prefix + key, offload)) is not None]
        if own:
            rests = any(offload[one] for one in own)
            hook = self.hook(devices[own[0]], offload=rests, name=name, io_same_device=not name)
            add_hook_to_module(module, hook)
        elif not name:
            add_hook_to_module(module, self.hook(devices.get(""), io_same_device=True))
        for child_name, child in module.named_children():
            self.align_blocks(child, devices, offload, _below(name, child_name))

    def _align_block(self, module: nn.Module, device: Any, name: str, *, offload: bool) -> None:
        if offload:
            self.align(module, device, name, offload=True, io_same_device=not name)
            if not hasattr(module, "_hf_hook"):
                add_hook_to_module(module, self.hook(device, io_same_device=not name))
        else:
            add_hook_to_module(module, self.hook(device, io_same_device=not name, place_submodules=True))
        self.execute(module, device)


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Any,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach a hook to the modules inside ``module`` that have none yet: their inputs and weights are moved to the
    device.

    Args:
        skip_keys: keyword arguments of ``forward`` that are not moved.
        preload_module_classes: names of classes; modules inside those of these classes get no hook.
        tied_params_map: tied tensors; see ``AlignDevicesHook``.
    """
    common = Attachment(None, False, skip_keys, preload_module_classes or (), tied_params_map)
    common.execute(module, execution_device)
    clear_cache_of(execution_device)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach an ``AlignDevicesHook`` to each module inside ``module`` that has tensors of its own.

    Args:
        execution_device: where the modules compute.
        offload: whether the modules have their weights only inside ``forward``.
        weights_map: offloaded weights by name; default: the present ones, in CPU memory.
        offload_buffers: whether persistent buffers are offloaded, too.
        module_name: name of ``module`` in ``weights_map``.
        skip_keys: keyword arguments of ``forward`` that are not moved.
        preload_module_classes: names of classes whose modules get the weights of all modules inside them at once. This
            is needed where a module uses the weights of another one without calling it.
        tied_params_map: tied tensors; see ``AlignDevicesHook``.
    """
    common = Attachment(weights_map, offload_buffers, skip_keys, preload_module_classes or (), tied_params_map)
    common.align(module, execution_device, module_name, offload=offload)
    clear_cache_of(execution_device)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedTensors | None = None,
    *,
    common: Attachment | None = None,
) -> None:
    """Attach hooks by the blocks of a device map.

    Args:
        execution_device: one device, or the device of each module in the map; under ``""`` that of the whole model.
        offload: one value, or one for each module in the map.
        weights_map, offload_buffers, module_name, skip_keys, preload_module_classes, tied_params_map: as in
            ``attach_align_device_hook``.
        common: arguments shared with the model's other hooks, instead of the arguments above.
    """
    if common is None:
        common = Attachment(weights_map, offload_buffers, skip_keys, preload_module_classes or (), tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            replace(common, preload_module_classes=()).align(module, execution_device, module_name, offload=True)
        else:
            hook = common.hook(execution_device, io_same_device=True, place_submodules=True)
            add_hook_to_module(module, hook)
        clear_cache_of(execution_device)
        return
    devices: Any = execution_device
    offloads: Any = offload
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(offloads, devices)
    if not isinstance(offloads, Mapping):
        offloads = dict.fromkeys(devices, offloads)
    common.align_blocks(module, devices, offloads, module_name)
    clear_cache_of(*devices.values())


def guard_moves(model: nn.Module) -> None:
    """Replace ``model.to`` and similar methods with ones that refuse to move a model with offloaded parts. For other
    models they log a warning. ``remove_hook_from_module`` restores the original methods."""
    for name in GUARDED:
        method = getattr(model, name, None)
        if method is not None and name not in model.__dict__:
            setattr(model, name, functools.partial(_move, model, name, method.__func__))


def _move(model: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """``model.to``, or a similar method, of a distributed model.

    Raises:
        OffloadError: parts of the model are offloaded.
    """
    moves = name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None
    if is_offloaded(model):
        raise OffloadError(
            f"model.{name}(): parts of the model are offloaded to CPU memory or disk. Call "
            "hpcaccel.hooks.remove_hook_from_submodules(model) first, which restores its weights"
        )
    if moves:
        log.warning("model.%s() moves a model that is distributed by a device map: its hooks are not changed", name)
    return method(model, *args, **kwargs)
