"""Loads weights from files that ``save_model`` or Hugging Face libraries have written. No code in the files is run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import holds_shards, named_state, open_safetensors
from hpcaccel.runtime.checkpointing.model_weight_files import SAFE, TORCH

__all__ = ["load_checkpoint_in_model", "load_state_dict"]


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """The tensors in one file, which is a ``.safetensors`` file or was written by ``torch.save``.

    Args:
        device_map: ``{"": device}`` with the device for all tensors; None means the CPU.

    Raises:
        CheckpointError: the file does not exist, or cannot be read.
        RuntimeMisuse: ``device_map`` contains several devices.
    """
    path = Path(checkpoint_file)
    device = _only_device(device_map)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        return _load_safetensors(path, device)
    import pickle

    try:
        found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"cannot load weights from {path}: {error}. Files that contain anything but tensors and plain values are "
            "not loaded, because loading them could run code"
        ) from error
    return found


def _load_safetensors(path: Path, device: str) -> dict[str, Any]:
    with open_safetensors(path, device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping


def _only_device(device_map: Any) -> str:
    devices = {str(device) for device in (device_map or {"": "cpu"}).values()}
    if len(devices) > 1:
        raise RuntimeMisuse(
            f"device_map={device_map!r}: distributing a model over several devices of one process is not supported. "
            'Shard it over the ranks with strategy="fsdp"'
        )
    return devices.pop()


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: Any = None,
    strict: bool = False,
    **others: Any,
) -> None:
    """Load weights from files written by ``save_model`` into a plain or prepared model, in place.

    All ranks must call this if the model is sharded.

    Args:
        checkpoint: a file, an ``.index.json``, or a directory with either.
        device_map: None or ``{"": device}``. Has no effect, because the parameters stay on their devices.
        offload_folder, dtype: not supported; must be None.
        strict: whether missing and unexpected names are an error.
        others: some more of Accelerate's keywords, which have no effect here.

    Raises:
        CheckpointError: there is no such file; a file cannot be read; shapes differ; names differ, and ``strict`` is
            true.
        RuntimeMisuse: an ``offload_folder``, a ``dtype``, an unknown keyword or several devices are given; or for the
            reasons that ``load_sharded`` lists.
    """
    _only_device(device_map)
    if offload_folder is not None or dtype is not None:
        raise RuntimeMisuse(
            "load_checkpoint_in_model() does not support offload_folder and dtype. To change the dtype, call "
            "model.to(dtype) first"
        )
    if unknown := set(others) - _HARMLESS:
        names = f"argument{'s' * (len(unknown) > 1)} {', '.join(sorted(unknown))}"
        raise RuntimeMisuse(f"load_checkpoint_in_model(): unknown keyword {names}")
    path = Path(checkpoint)
    if any(True for _ in _pickled(path)):
        _load_pickled(model, path, strict=strict)
        return
    from hpcaccel.runtime.checkpointing.sharded_load import load_sharded

    load_sharded(model, path, strict=strict)


_HARMLESS = {
    "broadcast_from_rank0",
    "full_state_dict",
    "keep_in_fp32_modules",
    "offload_8bit_bnb",
    "offload_buffers",
    "offload_state_dict",
}
"""Accelerate's keywords that are accepted and have no effect."""


def _pickled(path: Path) -> Iterator[Path]:
    """The files of a checkpoint in the format of ``torch.save``; nothing if ``path`` has another format."""
    if path.is_dir():
        if any(SAFE.owns(item.name) for item in path.iterdir()):
            return
        path = next((path / name for name in (TORCH.index_name, TORCH.single) if (path / name).is_file()), path)
    if path.name.endswith(".bin.index.json"):
        places = json.loads(path.read_text())["weight_map"]
        yield from sorted({path.parent / str(name) for name in places.values()})
    elif path.is_file() and path.suffix not in (".json", ".safetensors"):
        yield path


def _load_pickled(model: nn.Module, path: Path, *, strict: bool) -> None:
    """Load one file after the other. A sharded model gets only this rank's shard of each tensor."""
    targets = named_state(model, keep_vars=True)
    filled: set[int] = set()
    unexpected: list[str] = []
    for file in _pickled(path):
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
