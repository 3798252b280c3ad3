"""Distributing a model over accelerators, CPU memory and the disk, so that it computes as if it were in one place."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.runtime.compat.introspection import find_tied_parameters, retie_parameters
from hpcaccel.runtime.offload.aligned_devices import AlignDevicesHook
from hpcaccel.runtime.offload.attach import Attachment, attach_align_device_hook_on_blocks, guard_moves
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.model_parts import check_device_map, check_module, device_of
from hpcaccel.runtime.offload.module_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module, is_offloaded
from hpcaccel.runtime.offload.tensor_placement import TiedTensors, clear_cache_of, set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import (
    INDEX,
    OffloadedWeightsLoader,
    offload_state_dict,
    written_folder,
)

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
]


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in CPU memory, and move each module's to the device during its ``forward``.

    Args:
        execution_device: where the model computes; default: the device of its first parameter.
        offload_buffers: whether persistent buffers are offloaded, too. If not, they stay on ``execution_device``.
        state_dict: the weights in CPU memory; default: the model's own.
        preload_module_classes: names of classes whose modules get the weights of all modules inside them at once. This
            is needed where a module uses the weights of another one without calling it.

    Returns:
        The same model.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in CPU memory until its ``forward`` is called. It then stays on the device until the next model of
    the pipeline runs, or ``offload`` of its hook is called.

    Args:
        execution_device: default: this machine's accelerator, or the CPU.
        prev_module_hook: the hook of the model that runs before, which is moved back to CPU memory first.

    Returns:
        The same model, and its hook.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in a folder, and read each module's during its ``forward``.

    Args:
        offload_dir: the folder. If it has an index, its weights are used, and nothing is written. If a process group
            with several ranks exists, each of them uses the folder ``rank_N`` inside it, unless only the folder itself
            has an index.
        execution_device: where the model computes; default: the device of its first parameter.
        offload_buffers, preload_module_classes: as in ``cpu_offload``.

    Returns:
        The same model.

    Raises:
        OffloadError: the folder has an index, but not for the weights of this model; the model is on the meta device.
    """
    folder = written_folder(offload_dir)
    if not Path(folder, INDEX).is_file():
        offload_state_dict(folder, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=folder)
    _complete(weights, _shapes(model, buffers=offload_buffers), find_tied_parameters(model))
    for name, buffer in list(model.named_buffers()) if not offload_buffers else ():
        if buffer.is_meta and name in weights:
            set_module_tensor_to_device(model, name, "cpu", value=weights[name].clone())
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload_all(
    model: nn.Module,
    execution_device: Any,
    offload_buffers: bool,
    weights: Mapping[str, torch.Tensor],
    preload_module_classes: Collection[str] | None,
) -> nn.Module:
    if execution_device is None:
        found = next(model.parameters()).device
        execution_device = torch.device("cpu") if found.type == "meta" else found
    keys = _tie_keys(model, find_tied_parameters(model))
    common = Attachment(
        weights,
        offload_buffers,
        preload_module_classes=preload_module_classes or (),
        tied_params_map={key: {} for key in keys.values()},
        tie_keys=keys,
    )
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    common.align(model, execution_device, "", offload=True)
    clear_cache_of(execution_device)
    return model


def _tie_keys(model: nn.Module, ties: Sequence[Sequence[str]]) -> dict[str, Hashable]:
    """For each tied parameter, a key that it shares with those it is tied to: the address of the data, as Accelerate
    has it, or the first name if it has no data."""
    keys: dict[str, Hashable] = {}
    for group in ties:
        first = model.get_parameter(group[0])
        keys |= dict.fromkeys(group, group[0] if first.is_meta or not first.numel() else first.data_ptr())
    return keys


def _shapes(model: nn.Module, *, buffers: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that are offloaded: the parameters, and if ``buffers`` is true the persistent buffers."""
    tensors = model.state_dict(keep_vars=True).items()
    return {name: tuple(one.shape) for name, one in tensors if isinstance(one, nn.Parameter) or buffers}


def _complete(
    weights: OffloadedWeightsLoader, shapes: Mapping[str, tuple[int, ...]], ties: Sequence[Sequence[str]]
) -> None:
    """Let tied weights that are stored under one name be found under all.

    Raises:
        OffloadError: a weight is not stored, or has another shape.
    """
    for group in ties:
        stored = next((name for name in group if name in weights.index), None)
        if stored is not None:
            entry = {"weight_name": stored, **weights.index[stored]}
            for name in group:
                weights.index.setdefault(name, entry)
    place = weights.save_folder or "the index"
    if missing := [name for name in shapes if name not in weights.index and name not in weights.state_dict]:
        has = shortened([*weights.index], 5) or "none"
        raise OffloadError(
            f"{place} has no weights for {shortened(missing, 5)} (it has {has}). Pass an empty offload folder, or load "
            "the model with load_checkpoint_and_dispatch()"
        )
    for name, shape in shapes.items():
        if name not in weights.state_dict and (found := weights.stored(name).shape) != shape:
            raise OffloadError(
                f"{name} has the shape {found} in {place}, but {shape} in the model: these are weights of another "
                "model. Pass an empty offload folder"
            )


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Distribute a model over devices. Parts on ``"cpu"`` (if there is an accelerator in the map) and on ``"disk"``
    get their weights on the main device during their ``forward``, while those of the next part are read.

    Args:
        device_map: the device of each module: the index of an accelerator, a name such as ``"cuda:0"``, ``"cpu"`` or
            ``"disk"``.
        main_device: where offloaded parts compute; default: the first accelerator in the map, or the CPU.
        state_dict: the weights of the parts on the CPU; default: the model's own.
        offload_dir: folder for the weights of the parts on disk, used as in ``disk_offload``.
        offload_index: entries as in the folder's index, instead of it.
        offload_buffers: whether persistent buffers of offloaded parts are offloaded, too.
        skip_keys: keyword arguments of ``forward`` that are not moved.
        preload_module_classes: as in ``cpu_offload``.
        force_hooks: whether to attach hooks even if the whole model is on one device.

    Returns:
        The same model, with ``hf_device_map``.

    Raises:
        OffloadError: the map has no device for some tensors; there is no folder for the parts on disk, or it has no
            weights for them; some tensors are on the meta device.
        RuntimeMisuse: ``model`` is not a module.
    """
    check_module(model, "dispatch_model(model, device_map)")
    check_device_map(model, device_map)
    devices = list(dict.fromkeys(device_map.values()))
    if len(devices) == 1 and devices != ["disk"] and not force_hooks:
        _refuse_empty(model, devices[0])
        return _with_map(model.to(as_device(devices[0])), device_map)
    if main_device is None:
        main_device = next((one for one in devices if str(one) not in ("cpu", "disk")), "cpu")
    ties = find_tied_parameters(model)
    keys = _tie_keys(model, ties)
    resting = ["disk"] if str(main_device) in ("cpu", "mps") else ["cpu", "disk"]
    if state_dict is None and "cpu" in resting:
        state_dict = _part(model, device_map, "cpu")
    weights = _weights(
        model, device_map, (state_dict, offload_dir, offload_index), ties, offload_buffers=offload_buffers
    )
    shared: TiedTensors = {key: {} for key in keys.values()}
    offloaded = {name: key for name, key in keys.items() if str(device_of(name, device_map)) in resting}
    common = Attachment(weights, offload_buffers, skip_keys, preload_module_classes or (), shared, offloaded)
    execution = {name: main_device if str(one) in ("cpu", "disk") else one for name, one in device_map.items()}
    offload = {name: str(device) in resting for name, device in device_map.items()}
    attach_align_device_hook_on_blocks(model, {**execution, "": execution.get("", main_device)}, offload, common=common)
    retie_parameters(model, [[name for name in group if name not in common.tie_keys] for group in ties])
    guard_moves(model)
    return _with_map(model, device_map)


def _refuse_empty(model: nn.Module, device: Any) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty and as_device(device).type != "meta":
        remedy = (
            "Call hpcaccel.hooks.remove_hook_from_submodules(model) first: parts of the model are offloaded"
            if is_offloaded(model)
            else "Load and distribute the model with load_checkpoint_and_dispatch(model, checkpoint, device_map=...)"
        )
        raise OffloadError(
            f"cannot move {type(model).__name__} to {device}: tensors on the meta device have no values "
            f"({shortened(empty, 5)}). {remedy}"
        )


def _with_map(model: nn.Module, device_map: Mapping[str, Any]) -> nn.Module:
    attributes: Any = model
    attributes.hf_device_map = dict(device_map)
    return model


def _weights(
    model: nn.Module,
    device_map: Mapping[str, Any],
    stored: tuple[Any, Any, Any],
    ties: Sequence[Sequence[str]],
    *,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """The weights of the offloaded parts. Those for the disk are written, unless the folder has an index.

    Args:
        stored: the arguments ``state_dict``, ``offload_dir`` and ``offload_index`` of ``dispatch_model``.
    """
    state_dict, folder, index = stored
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if not on_disk:
        return None if state_dict is None and index is None else OffloadedWeightsLoader(state_dict, None, index or {})
    if folder is None and index is None:
        parts = shortened([name or "the whole model" for name in on_disk], 5)
        raise OffloadError(
            f"the device map puts {parts} on disk: pass a folder as offload_dir (dispatch_model) or offload_folder "
            "(Accelerator.prepare)"
        )
    if index is None:
        folder = written_folder(folder)
        if not Path(folder, INDEX).is_file():
            offload_state_dict(folder, _part(model, device_map, "disk"))
    weights = OffloadedWeightsLoader(state_dict, folder, index)
    shapes = _shapes(model, buffers=offload_buffers)
    _complete(weights, {name: one for name, one in shapes.items() if device_of(name, device_map) == "disk"}, ties)
    return weights


def _part(model: nn.Module, device_map: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """The tensors that a map puts on a device."""
    return {name: one for name, one in model.state_dict().items() if str(device_of(name, device_map)) == device}
