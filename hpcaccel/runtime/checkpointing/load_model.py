"""Loads weights from files that ``save_model`` or Hugging Face libraries have written. No code in the files is run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import read_index
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.export_model import holds_shards, named_state, open_safetensors
from hpcaccel.runtime.checkpointing.model_weight_files import SAFE, TORCH
from hpcaccel.runtime.checkpointing.sharded_load import LoadedWeights, device_of_model, load_sharded, mismatch
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.model_parts import device_of
from hpcaccel.runtime.parallel import meta_device

__all__ = ["copy_part", "load_state_dict", "load_values", "load_whole", "pickled"]


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """The tensors in one file, which is a ``.safetensors`` file or was written by ``torch.save``.

    Args:
        device_map: the device of each module or tensor; those on ``"disk"``, or without a device, are in CPU memory.
            None means the CPU.

    Raises:
        CheckpointError: the file does not exist, or cannot be read.
        OffloadError: ``device_map`` has an unknown device.
    """
    path = Path(checkpoint_file)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    places = {name: device for name, device in (device_map or {}).items() if device != "disk"}
    if path.suffix == ".safetensors":
        return _load_safetensors(path, places)
    from hpcaccel.checkpoint.formats.foreign import restricted

    found = restricted(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} contains a {type(found).__name__}; weights must be a dict of tensors by name")
    return {
        name: value.to(_device_of(name, places)) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def _load_safetensors(path: Path, places: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with open_safetensors(path) as file:
        names = list(file.keys())
    devices = {name: str(_device_of(name, places)) for name in names}
    for device in dict.fromkeys(devices.values()):
        with open_safetensors(path, device) as file:
            found |= {name: file.get_tensor(name) for name in names if devices[name] == device}
    return {name: found[name] for name in names}


def _device_of(name: str, places: dict[str, Any]) -> torch.device:
    return as_device(device_of(name, {"": "cpu", **places}))


def load_whole(model: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Load weights into a plain or prepared model, in place: each tensor stays on its device.

    Returns:
        The names that only the files have.

    Raises:
        CheckpointError, RuntimeMisuse: as ``load_checkpoint_in_model``.
    """
    if not any(True for _ in pickled(path)):
        return load_sharded(model, path, strict=strict).unexpected_keys
    values = ((name, value) for file in pickled(path) for name, value in load_state_dict(file).items())
    return load_values(model, values, path, strict=strict).unexpected_keys


def pickled(path: Path) -> Iterator[Path]:
    """The files of a checkpoint of which at least one is in the format of ``torch.save``; nothing if ``path`` has
    another format."""
    if path.is_dir():
        if any(SAFE.owns(item.name) for item in path.iterdir()):
            return
        path = next((path / name for name in (TORCH.index_name, TORCH.single) if (path / name).is_file()), path)
    if path.is_dir() and len(found := list(path.glob("*.index.json"))) == 1:
        path = found[0]
    if path.name.endswith(".index.json") and path.is_file():
        files = {path.parent / name for name in read_index(path).values()}
        if any(file.suffix != ".safetensors" for file in files):
            yield from sorted(files)
    elif path.is_file() and path.suffix not in (".json", ".safetensors"):
        yield path


def load_values(model: nn.Module, values: Iterable[tuple[str, Any]], where: Path, *, strict: bool) -> LoadedWeights:
    """Copy tensors into a plain or prepared model, one after the other. A sharded model gets only this rank's shard of
    each. Of parameters that are tied, ``values`` needs to contain only one. Parameters on the meta device are allocated
    first.

    Args:
        values: pairs of a name, without the prefixes of wrappers, and a whole tensor.
        where: the file or directory, for error messages.

    Returns:
        The missing and the unexpected names.

    Raises:
        CheckpointError: shapes differ; or names differ, and ``strict`` is true.
        RuntimeMisuse: as ``load_sharded``.
    """
    if meta_device.is_empty(model):
        meta_device.give_memory(model, device_of_model(model))
    targets = named_state(model, keep_vars=True)
    filled: set[int] = set()
    unexpected: list[str] = []
    for name, value in values:
        target = targets.get(name)
        if not isinstance(target, torch.Tensor):
            unexpected.append(name)
            continue
        if target.shape != value.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)} in {where.name}, but {tuple(target.shape)} in the model"
            )
        copy_part(target, value)
        filled.add(id(target))
    tensors = {name: target for name, target in targets.items() if isinstance(target, torch.Tensor)}
    missing = [name for name, target in tensors.items() if id(target) not in filled]
    if strict and (missing or unexpected):
        raise mismatch(where, missing, unexpected)
    if not missing:
        meta_device.has_values(model)
    return LoadedWeights(missing, unexpected)


@torch.no_grad()
def copy_part(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into ``target``; if this is a DTensor, only this rank's shard of it."""
    if not holds_shards(target):
        target.copy_(value)
        return
    sharded: Any = target.detach()
    for chunk in sharded.__create_chunk_list__():
        part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if all(chunk.sizes):
            sharded.to_local().copy_(value[part])
