"""Weights from safetensors files into a model that may be sharded: each rank reads its own slices and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.safetensors_import import open_safetensors
from hpcaccel.runtime.parallel import materialise
from hpcaccel.runtime.parallel.dtensors import is_dtensor

__all__ = ["LoadedWeights", "load_sharded"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LoadedWeights(NamedTuple):
    """What did not fit together, as torch's ``load_state_dict`` tells it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_sharded(model: nn.Module, path: str | Path, *, strict: bool = True) -> LoadedWeights:
    """Load weights into a prepared or plain model, in place. All ranks call; none reads more than it keeps.

    A parameter on the meta device gets memory first. Values are cast to the parameters' dtype. Of tied parameters the
    file needs to hold one.

    Args:
        path: a ``.safetensors`` file, an ``.index.json``, or a directory with either (``model.safetensors``,
            ``model.safetensors.index.json``).
        strict: whether missing and unexpected names are an error; otherwise they come back.

    Raises:
        CheckpointError: there is no such file, names or shapes differ, or safetensors is not installed.
    """
    files = _files(Path(path))
    if materialise.is_empty(model):
        materialise.give_memory(model, _device(model))
    wanted = _wanted(model)
    known = {name for names, _ in wanted for name in names}
    missing = [names[0] for names, _ in wanted if not any(name in files for name in names)]
    unexpected = sorted(set(files) - known)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} does not belong to this model: "
            + "; ".join([*_told("missing", missing), *_told("unexpected", unexpected)])
        )
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
        materialise.has_values(model)
    return LoadedWeights(missing, unexpected)


def _told(what: str, names: list[str]) -> Iterator[str]:
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        yield f"{what} in the file: {shown}" if what == "missing" else f"{what} there: {shown}"


def _files(path: Path) -> dict[str, Path]:
    """Each tensor's name with the file that holds it.

    Raises:
        CheckpointError: there is no such file, or it is none of these.
    """
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        found = found or sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1 and INDEX not in {item.name for item in found}:
            has = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
            raise CheckpointError(f"{path} holds neither {INDEX} nor {SINGLE} (it holds {has})")
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".json":
        return _indexed(path)
    with open_safetensors(path) as file:
        return dict.fromkeys(file.keys(), path)


def _indexed(path: Path) -> dict[str, Path]:
    try:
        places = json.loads(path.read_text())["weight_map"]
        files = {str(name): path.parent / str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    if lost := sorted({file.name for file in files.values() if not file.is_file()}):
        raise CheckpointError(f"{path} names {', '.join(lost)}, which is not there")
    return files


def _device(model: nn.Module) -> torch.device:
    """Where the other parameters are, else this rank's device."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    from hpcaccel.runtime.distributed.world import World

    world = World.existing()
    return torch.device("cpu") if world is None else world.device


def _wanted(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Parameters and persistent buffers, each with all of its names."""
    from hpcaccel.checkpoint.parameter_names import public_name

    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ([], value))[0].append(public_name(model, key))
    return list(found.values())


def _fill(tensor: torch.Tensor, stored: Any, name: str, file: Path) -> None:
    """This rank's part of ``tensor`` from the file.

    Raises:
        CheckpointError: another shape.
    """
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise CheckpointError(f"{name} has shape {shape} in {file.name}, {tuple(tensor.shape)} in the model")
    if not is_dtensor(tensor):
        tensor.copy_(stored[...])
        return
    sharded: Any = tensor.detach()
    for chunk in sharded.__create_chunk_list__():
        part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if all(chunk.sizes):
            sharded.to_local().copy_(stored[part])
