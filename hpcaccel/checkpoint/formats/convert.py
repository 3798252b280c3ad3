"""From any source to any target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.formats.foreign import open_dcp, open_files
from hpcaccel.checkpoint.formats.ours import open_ours, write_ours
from hpcaccel.checkpoint.formats.safetensors_writer import write_safetensors
from hpcaccel.checkpoint.formats.torch_writer import write_torch
from hpcaccel.checkpoint.formats.weights import Source, Weight, cast
from hpcaccel.checkpoint.formats.whole import whole_state
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.contents import Contents
from hpcaccel.checkpoint_files.dcp_reader import is_dcp
from hpcaccel.checkpoint_files.verify import is_ours, weight_files
from hpcaccel.errors import CheckpointError

__all__ = ["Request", "convert"]


@dataclass(frozen=True)
class Request:
    """What to convert: see the options of ``hpcaccel checkpoint convert``."""

    source: str
    target: str
    to: str
    model: int | None = None
    whole: bool = False
    part: str | None = None
    dtype: str | None = None
    max_shard_bytes: int = 10**10


def convert(request: Request, tell: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Do it; ``files``, ``tensors``, ``bytes`` and ``notes`` of what was written.

    Raises:
        CheckpointError: the source is damaged, of no known kind, or does not fit the request.
    """
    path, target = Path(request.source), Path(request.target)
    if request.whole:
        return _convert_whole(request, path, target, tell)
    source = _open(request, path)
    if not source.weights:
        raise CheckpointError(f"{path} holds no tensors of a model")
    if request.dtype is not None:
        source = replace(source, weights=cast(source.weights, _float_dtype(request.dtype)))
    wrote = _counted(sum(weight.bytes for weight in source.weights), tell)
    notes = [*source.notes]
    if request.to == "torch":
        value = {name: weight for weight in source.weights for name in (weight.name, *weight.ties)}
        write_torch(target, value | source.extra, wrote=wrote)
        files = [str(target)]
    else:
        notes += [f"{name} is no tensor and left out" for name in source.extra]
        if request.to == "safetensors":
            names = write_safetensors(target, source.weights, max_shard_bytes=request.max_shard_bytes, wrote=wrote)
        else:
            names = write_ours(target, source, origin=f"{source.kind} {path}", wrote=wrote)
            notes.append("it holds a model's weights only: a training that begins from it starts at step 0")
        files = [str(target / name) for name in names]
    return _answer(files, source.weights, notes)


def _open(request: Request, path: Path) -> Source:
    if path.is_dir() and is_ours(path):
        if request.part is not None:
            raise CheckpointError("--part is for checkpoints of other programs; of ours --model N chooses the model")
        return open_ours(path, request.model)
    if request.model is not None:
        raise CheckpointError("--model counts the models of our checkpoints; elsewhere --part KEY says where it is")
    if is_dcp(path):
        return open_dcp(path, request.part)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not weight_files(path):
        raise CheckpointError(f"{path} holds nothing to convert: no checkpoint, and no file of weights")
    return open_files(path, request.part)


def _convert_whole(request: Request, path: Path, target: Path, tell: Callable[[int, int], None]) -> dict[str, Any]:
    if request.to != "torch" or not is_ours(path) or request.model is not None or request.dtype is not None:
        raise CheckpointError(
            "--whole makes one file of torch.save (--to torch) from a checkpoint of ours, without --model and --dtype"
        )
    state = whole_state(Contents(path))
    weights = list({id(weight): weight for weight in _weights(state)}.values())
    write_torch(target, state, wrote=_counted(sum(weight.bytes for weight in weights), tell))
    return _answer([str(target)], weights, [])


def _weights(value: Any) -> list[Weight]:
    if isinstance(value, Weight):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [weight for item in inner for weight in _weights(item)]


def _float_dtype(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    if not dtype.is_floating_point:
        raise CheckpointError(f"--dtype {name}: floating-point weights become floating-point ones, such as bfloat16")
    return dtype


def _counted(total: int, tell: Callable[[int, int], None]) -> Callable[[int], None]:
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    return wrote


def _answer(files: list[str], weights: list[Weight], notes: list[str]) -> dict[str, Any]:
    return {
        "files": files,
        "tensors": len(weights),
        "bytes": sum(weight.bytes for weight in weights),
        "notes": notes,
    }
