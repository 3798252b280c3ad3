"""Loads safetensors files into a model that may be sharded: each rank reads only its own slices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import read_index
from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.export_model import open_safetensors
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.parallel import meta_device

__all__ = ["LoadedWeights", "device_of_model", "load_sharded", "mismatch", "weight_files"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LoadedWeights(NamedTuple):
    """The missing and the unexpected names, as in the result of torch's ``load_state_dict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_sharded(model: nn.Module, path: str | Path, *, strict: bool = True) -> LoadedWeights:
    """Load weights into a prepared or plain model, in place. All ranks call this.

    Parameters on the meta device are allocated first. Values are cast to the parameters' dtype. Of parameters that are
    tied, the files need to contain only one.

    Args:
        path: a ``.safetensors`` file, an ``.index.json``, or a directory with either, such as ``model.safetensors`` or
            ``model.safetensors.index.json``.
        strict: whether missing and unexpected names are an error.

    Returns:
        The missing and the unexpected names.

    Raises:
        CheckpointError: there is no such file; a file cannot be read; shapes differ; names differ, and ``strict`` is
            true; safetensors is not installed.
        RuntimeMisuse: a module on the meta device has non-persistent buffers but no ``reset_parameters`` method.
    """
    files = weight_files(Path(path))
    if meta_device.is_empty(model):
        meta_device.give_memory(model, device_of_model(model))
    wanted = _wanted(model)
    names_of_model = {name for names, _ in wanted for name in names}
    missing = [names[0] for names, _ in wanted if not any(name in files for name in names)]
    unexpected = sorted(set(files) - names_of_model)
    if strict and (missing or unexpected):
        raise mismatch(path, missing, unexpected)
    with ExitStack() as stack, torch.no_grad():
        opened: dict[Path, Any] = {}
        for names, tensor in wanted:
            name = next((name for name in names if name in files), None)
            if name is not None:
                file = files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(open_safetensors(file))
                _fill(tensor, opened[file].get_slice(name), name, file)
    if not missing:
        meta_device.has_values(model)
    return LoadedWeights(missing, unexpected)


def mismatch(path: str | Path, missing: Sequence[str], unexpected: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint whose parameter names differ from the model's."""
    lists = {"missing from": missing, "only in": unexpected}
    found = "; ".join(f"{what} the checkpoint: {shortened(names, 5)}" for what, names in lists.items() if names)
    return CheckpointError(
        f"{path} does not match this model: {found}. Pass strict=False to load only the matching weights"
    )


def weight_files(path: Path) -> dict[str, Path]:
    """For each tensor's name, the file that contains the tensor.

    Raises:
        CheckpointError: ``path`` does not exist, or is not a safetensors file, an index, or a directory with either.
    """
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        found = found or sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1 and INDEX not in {item.name for item in found}:
            has = shortened(sorted(item.name for item in path.iterdir()), 8) or "nothing"
            raise CheckpointError(f"{path} contains neither {INDEX} nor {SINGLE} (it contains {has})")
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".json":
        return _indexed(path)
    with open_safetensors(path) as file:
        return dict.fromkeys(file.keys(), path)


def _indexed(path: Path) -> dict[str, Path]:
    files = {name: path.parent / file for name, file in read_index(path).items()}
    if lost := sorted({file.name for file in files.values() if not file.is_file()}):
        raise CheckpointError(f"{path} refers to missing files: {', '.join(lost)}. Copy them into its directory")
    return files


def device_of_model(model: nn.Module) -> torch.device:
    """The device of the model's first tensor that is not on the meta device; this rank's device if there is none."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    from hpcaccel.runtime.distributed.world import World

    world = World.existing()
    return torch.device("cpu") if world is None else world.device


def _wanted(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The model's parameters and persistent buffers, each with all of its names: pairs (names, tensor)."""
    from hpcaccel.checkpoint.training_state import public_name

    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ([], value))[0].append(public_name(model, key))
    return list(found.values())


def _fill(tensor: torch.Tensor, stored: Any, name: str, file: Path) -> None:
    """Read this rank's shard of ``tensor`` from ``stored``.

    Raises:
        CheckpointError: the shapes differ.
    """
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise CheckpointError(f"{name} has shape {shape} in {file.name}, but {tuple(tensor.shape)} in the model")
    if not is_dtensor(tensor):
        tensor.copy_(stored[...])
        return
    sharded: Any = tensor.detach()
    for chunk in sharded.__create_chunk_list__():
        part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if all(chunk.sizes):
            sharded.to_local().copy_(stored[part])
