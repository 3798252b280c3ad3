"""The parts of a model for a device map: their sizes, ties and splitting, and whether a map covers them."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.introspection import convert_file_size_to_int
from hpcaccel.runtime.offload.device_memory import module_sizes
from hpcaccel.runtime.offload.mapped_tensors import OffloadError

__all__ = [
    "Part",
    "check_device_map",
    "check_module",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_total_buffer_size",
    "device_of",
    "fallback_allocate",
    "get_max_layer_size",
    "get_module_size_with_ties",
    "part_of",
    "split_part",
    "ties_outside",
    "warn_of_unknown",
]

log = logging.getLogger(__name__)

Part = tuple[str, Any]
"""A module, parameter or buffer of the model, with its name."""


def compute_module_total_buffer_size(
    model: nn.Module, dtype: torch.dtype | str | None = None, special_dtypes: Mapping[str, Any] | None = None
) -> float:
    """Size of all buffers in bytes."""
    return module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[Part], module_sizes: Mapping[str, float], no_split_module_classes: Collection[str]
) -> tuple[float, list[str]]:
    """Size of the largest layer in bytes, and the names of all layers of this size. A layer is a module without
    children, a module of one of the classes ``no_split_module_classes``, or a single tensor.

    Args:
        module_sizes: bytes by name, from ``compute_module_sizes``.
    """
    largest: float = 0
    names: list[str] = []
    waiting = list(modules)
    while waiting:
        name, part = waiting.pop(0)
        children = [] if type(part).__name__ in no_split_module_classes else _children(name, part)
        if children:
            waiting[:0] = children
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def _children(name: str, part: Any) -> list[Part]:
    return [(f"{name}.{key}", child) for key, child in part.named_children()] if isinstance(part, nn.Module) else []


def split_part(name: str, part: Any, whole: Collection[str]) -> list[Part]:
    """The parts of a module: its own tensors, then its children. Empty if it must not be split."""
    children = [] if type(part).__name__ in whole else _children(name, part)
    if not children:
        return []
    tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    return [*((f"{name}.{key}", tensor) for key, tensor in tensors), *children]


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: float, module_sizes: Mapping[str, float], modules_to_treat: Sequence[Part]
) -> tuple[float, list[str], list[Any]]:
    """Size in bytes of a module and of all modules that its tied parameters belong to; the names of these modules; and
    these modules.

    Args:
        tied_params: names of the other modules' parameters that are tied to the module's.
        modules_to_treat: modules that have no device yet; others are not counted.
    """
    found: list[tuple[str, Part]] = []
    for name in tied_params:
        owner = next((part for part in modules_to_treat if name.startswith(f"{part[0]}.")), None)
        if owner is not None:
            found.append((name, owner))
    more = sum(module_sizes[owner] - module_sizes[name] for name, (owner, _) in found)
    return module_size + more, [owner for _, (owner, _) in found], [part for _, (_, part) in found]


def ties_outside(name: str, ties: Sequence[Sequence[str]]) -> list[str]:
    """Names of the parameters that are tied to one inside the part ``name``, and are not inside it themselves."""

    def is_inside(parameter: str) -> bool:
        return f"{name}." in f"{parameter}."

    return [one for group in ties if any(map(is_inside, group)) for one in group if not is_inside(one)]


def fallback_allocate(
    modules: Sequence[Part],
    module_sizes: Mapping[str, float],
    size_limit: float | str,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[Part]]:
    """The first part of a model that fits into ``size_limit`` bytes, found by splitting modules that do not fit.

    Returns:
        Its name, the part, and the other parts: modules around it are split. Without a part that fits: None, None and
        ``modules``.
    """
    try:
        limit = convert_file_size_to_int(size_limit) if isinstance(size_limit, str) else size_limit
    except RuntimeMisuse:
        return None, None, list(modules)
    whole, ties = no_split_module_classes or (), tied_parameters or ()
    waiting = list(modules)
    while waiting:
        name, part = waiting.pop(0)
        size, _, _ = get_module_size_with_ties(ties_outside(name, ties), module_sizes[name], module_sizes, waiting)
        if size <= limit:
            return name, part, _without(name, list(modules))
        waiting[:0] = split_part(name, part, whole)
    return None, None, list(modules)


def _without(name: str, parts: list[Part]) -> list[Part]:
    """``parts`` without the part ``name``, which may be inside one of them."""
    while name not in (names := [one for one, _ in parts]):
        place = next(at for at, outer in enumerate(names) if name.startswith(f"{outer}."))
        parts[place : place + 1] = split_part(*parts[place], ())
    return [part for part in parts if part[0] != name]


def part_of(name: str, parts: Container[str]) -> str | None:
    """The innermost of the ``parts`` that is, or contains, the module or tensor ``name``; None if there is none."""
    while name not in parts:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a tensor: that of the innermost part of the map that contains it.

    Raises:
        OffloadError: no part of the map contains it.
    """
    part = part_of(name, device_map)
    if part is None:
        raise OffloadError(f"the device map has no device for {name} (it has {shortened([*device_map], 8)})")
    return device_map[part]


def check_module(model: Any, call: str) -> None:
    """Check the first argument of a function.

    Args:
        call: how the function is called, for the message.

    Raises:
        RuntimeMisuse: it is not a module.
    """
    if not isinstance(model, nn.Module):
        given = f"{str(model)!r}" if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise RuntimeMisuse(f"the first argument must be a torch.nn.Module, but is {given}: call {call}")


def warn_of_unknown(argument: str, names: Collection[str], model: nn.Module, what: str, known: Collection[str]) -> None:
    """Warn about names in an argument that a model does not have, each with the closest one of those that it has.

    Args:
        what: what the names are, for the message.
    """
    told = []
    for name in names:
        near = difflib.get_close_matches(str(name), known, n=1)
        told.append(f"{name!r}{f' (did you mean {near[0]!r}?)' if near else ''}")
    if told:
        log.warning("%s: %s has no %s %s", argument, type(model).__name__, what, shortened(told, 8))


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a map has a device for each tensor of the state dict. Warns about names that the model does not have.

    Raises:
        OffloadError: there is no device for some tensors.
    """
    known = {name for name, _ in model.named_modules()} | set(model.state_dict())
    if unknown := [name for name in device_map if name not in known]:
        warnings.warn(
            f"these device_map keys do not match any submodules of {type(model).__name__}: {shortened(unknown, 8)}",
            UserWarning,
            stacklevel=2,
        )
    names = [] if "" in device_map else list(model.state_dict())
    bare = [name for name in names if not any(name == one or name.startswith(f"{one}.") for one in device_map)]
    if bare:
        raise OffloadError(f"the device map has no device for {shortened(bare, 8)}. Add an entry for each")


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model of transformers is configured to tie weights."""
    config: Any = getattr(model, "config", None)
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__) or config is None:
        return False
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    words = bool(getattr(decoder, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None  # type: ignore[operator]
    coders = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    return words or coders


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about tied parameters that a map puts on different devices.

    Raises:
        OffloadError: the map has no device for one of them.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            log.warning("tied parameters are on different devices, and will be copied: %s", devices)
