"""Loads weights from files that ``save_model`` or Hugging Face libraries have written. No code in the files is run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.export_model import holds_shards, named_state, open_safetensors
from hpcaccel.runtime.checkpointing.model_weight_files import SAFE, TORCH
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.model_parts import device_of

__all__ = ["load_state_dict", "load_whole", "pickled", "weight_map"]


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
    import pickle

    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"cannot load weights from {path}: {error}. Files that contain anything but tensors and plain values are "
            "not loaded, because loading them could run code"
        ) from error
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
        from hpcaccel.runtime.checkpointing.sharded_load import load_sharded

        return load_sharded(model, path, strict=strict).unexpected_keys
    return _load_pickled(model, path, strict=strict)


def pickled(path: Path) -> Iterator[Path]:
    """The files of a checkpoint in the format of ``torch.save``; nothing if ``path`` has another format."""
    if path.is_dir():
        if any(SAFE.owns(item.name) for item in path.iterdir()):
            return
        path = next((path / name for name in (TORCH.index_name, TORCH.single) if (path / name).is_file()), path)
    if path.is_dir() and len(found := list(path.glob("*.index.json"))) == 1:
        path = found[0]
    if path.name.endswith(".index.json") and path.is_file():
        files = {path.parent / str(name) for name in weight_map(path).values()}
        yield from sorted(file for file in files if file.suffix != ".safetensors")
    elif path.is_file() and path.suffix not in (".json", ".safetensors"):
        yield path


def weight_map(path: Path) -> dict[str, str]:
    """For each tensor's name in an index, its file.

    Raises:
        CheckpointError: the file is not an index.
    """
    try:
        index = json.loads(path.read_text())
        places = index.get("weight_map", index)
        return {str(name): str(file) for name, file in places.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weight files: {error!r}") from error


def _load_pickled(model: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Load one file after the other. A sharded model gets only this rank's shard of each tensor. Returns the names that
    only the files have."""
    targets = named_state(model, keep_vars=True)
    filled: set[int] = set()
    unexpected: list[str] = []
    for file in pickled(path):
        for name, value in load_state_dict(file).items():
            target = targets.get(name)
            if not isinstance(target, torch.Tensor):
                unexpected.append(name)
                continue
            if target.shape != value.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(value.shape)} in {file.name}, but {tuple(target.shape)} in the model"
                )
            _fill(target, value)
            filled.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in filled]
    if strict and (missing or unexpected):
        from hpcaccel.runtime.checkpointing.sharded_load import mismatch

        raise mismatch(path, missing, unexpected)
    return unexpected


@torch.no_grad()
def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    if not holds_shards(target):
        target.copy_(value)
        return
    sharded: Any = target.detach()
    for chunk in sharded.__create_chunk_list__():
        part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if all(chunk.sizes):
            sharded.to_local().copy_(value[part])
