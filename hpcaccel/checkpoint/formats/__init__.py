"""Conversion of checkpoints to and from the file formats of other programs.

Sources and targets exchange a ``WeightSource``: a model's tensors by name. Each tensor is read only when it is about to
be written, so few are in memory at a time. Only ``torch.save`` files in the format of torch 1.5 and older are loaded
whole.
``hpcaccel checkpoint convert`` runs ``python -m hpcaccel.checkpoint.formats``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.formats.foreign import open_dcp, open_files
from hpcaccel.checkpoint.formats.ours import open_ours, whole_state, write_ours
from hpcaccel.checkpoint.formats.weight_writers import write_safetensors, write_torch
from hpcaccel.checkpoint.formats.weights import Weight, WeightSource, cast
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.contents import Contents
from hpcaccel.checkpoint_files.dcp_reader import is_dcp
from hpcaccel.checkpoint_files.verify import is_ours, weight_files
from hpcaccel.errors import CheckpointError

__all__ = ["ConvertRequest", "convert"]


@dataclass(frozen=True)
class ConvertRequest:
    """What to convert, and how: the fields are the options of ``hpcaccel checkpoint convert``."""

    source: str
    target: str
    to: str
    model: int | None = None
    whole: bool = False
    part: str | None = None
    dtype: str | None = None
    max_shard_bytes: int = 10**10


def convert(
    request: ConvertRequest, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Convert a checkpoint.

    Args:
        on_progress: called with the number of bytes written so far, and the total.

    Returns:
        A dict with ``files`` (paths of the files written), ``tensors`` (number of tensors), ``bytes`` (their total
        size) and ``notes`` (for the user).

    Raises:
        CheckpointError: the source is damaged, of an unknown kind, or does not fit the request; or the target exists.
    """
    path, target = Path(request.source), Path(request.target)
    if request.whole:
        return _convert_whole(request, path, target, on_progress)
    source = _open(request, path)
    if not source.weights:
        raise CheckpointError(f"{path} contains no model tensors. Pass a checkpoint or weight files of a model")
    if request.dtype is not None:
        source = replace(source, weights=cast(source.weights, _float_dtype(request.dtype)))
    wrote = _counted(sum(weight.bytes for weight in source.weights), on_progress)
    notes = [*source.notes]
    if request.to == "torch":
        value = {name: weight for weight in source.weights for name in (weight.name, *weight.ties)}
        write_torch(target, value | source.extra, wrote=wrote)
        files = [str(target)]
    else:
        notes += [f"{name} is not a tensor and was omitted" for name in source.extra]
        if request.to == "safetensors":
            names = write_safetensors(target, source.weights, max_shard_bytes=request.max_shard_bytes, wrote=wrote)
        else:
            names = write_ours(target, source, origin=f"{source.kind} {path}", wrote=wrote)
            notes.append("the checkpoint contains only model weights: training that loads it starts at step 0")
        files = [str(target / name) for name in names]
    return _summary(files, source.weights, notes)


def _open(request: ConvertRequest, path: Path) -> WeightSource:
    if path.is_dir() and is_ours(path):
        if request.part is not None:
            raise CheckpointError(
                "--part applies to checkpoints of other programs: for hpcaccel's, select the model with --model N"
            )
        return open_ours(path, request.model)
    if request.model is not None:
        raise CheckpointError(
            "--model applies to hpcaccel's checkpoints: for those of other programs, select the model with --part KEY"
        )
    if is_dcp(path):
        return open_dcp(path, request.part)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not weight_files(path):
        raise CheckpointError(f"{path} contains nothing to convert: neither a checkpoint nor a weight file")
    return open_files(path, request.part)


def _convert_whole(
    request: ConvertRequest, path: Path, target: Path, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    if request.to != "torch" or not is_ours(path) or request.model is not None or request.dtype is not None:
        raise CheckpointError(
            "--whole converts an hpcaccel checkpoint to one torch.save file: use it with --to torch, and without "
            "--model and --dtype"
        )
    state = whole_state(Contents(path))
    weights = list({id(weight): weight for weight in _weights(state)}.values())
    write_torch(target, state, wrote=_counted(sum(weight.bytes for weight in weights), on_progress))
    return _summary([str(target)], weights, [])


def _weights(value: Any) -> list[Weight]:
    if isinstance(value, Weight):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [weight for item in inner for weight in _weights(item)]


def _float_dtype(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    if not dtype.is_floating_point:
        raise CheckpointError(f"--dtype {name!r} is not a floating-point dtype (such as 'bfloat16')")
    return dtype


def _counted(total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return wrote


def _summary(files: list[str], weights: list[Weight], notes: list[str]) -> dict[str, Any]:
    return {
        "files": files,
        "tensors": len(weights),
        "bytes": sum(weight.bytes for weight in weights),
        "notes": notes,
    }
