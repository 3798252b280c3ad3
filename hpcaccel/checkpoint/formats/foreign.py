"""Checkpoints of other programs as sources of a conversion.

Pickles are read by torch's restricted loader (``weights_only``), which runs no code from the file.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.dcp_storage import raw_bytes
from hpcaccel.checkpoint.formats.weights import Weight, WeightSource, model_in, plain_names
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.dcp_reader import Dcp, DcpTensor
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.checkpoint_files.verify import weight_files
from hpcaccel.checkpoint_files.weight_files import SAFE, TORCH, SafeTensor, read_head, read_index
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["open_dcp", "open_files", "read_chunk", "read_value", "restricted"]


def open_files(path: Path, part: str | None) -> WeightSource:
    """Open a weight file, or all weight files of a directory. A directory must contain at least one weight file.

    Args:
        part: see ``weights.model_in``.

    Raises:
        CheckpointError: the directory has several files that are not the shards of one model, a file cannot be read, or
            it is not clear which entry is the model.
        Damaged: a file is damaged, or a shard is missing.
    """
    files = weight_files(path)
    _refuse_gaps(path, files)
    if path.is_dir() and len(files) > 1 and not any(form.owns(files[0].name) for form in (SAFE, TORCH)):
        raise CheckpointError(
            f"{path} contains several weight files: {', '.join(item.name for item in files)}. Give the path of one"
        )
    if files[0].suffix == ".safetensors":
        return _open_safetensors(files)
    return _open_torch(files, part)


def _refuse_gaps(path: Path, files: list[Path]) -> None:
    for form in (SAFE, TORCH):
        index = path / form.index_name
        if not path.is_dir() or not index.is_file() or not form.owns(files[0].name):
            continue
        if lost := sorted(set(read_index(index).values()) - {item.name for item in files}):
            raise Damaged(f"{index} refers to missing files: {', '.join(lost)}")


# -- safetensors


def _open_safetensors(files: list[Path]) -> WeightSource:
    found: dict[str, tuple[Path, SafeTensor]] = {}
    ties: dict[str, list[str]] = {}
    for file in files:
        head = read_head(file)
        found |= {name: (file, tensor) for name, tensor in head.tensors.items()}
        for other, name in head.metadata.items():
            if name in head.tensors and other not in head.tensors:
                ties.setdefault(name, []).append(other)
    names = plain_names([*found, *(tie for own in ties.values() for tie in own)])
    weights = [
        Weight(
            names[name],
            dtype_of(tensor.dtype),
            tensor.shape,
            partial(_read_safetensor, file, tensor, name),
            tuple(names[tie] for tie in ties.get(name, ())),
        )
        for name, (file, tensor) in found.items()
    ]
    return WeightSource("safetensors", weights)


def _read_safetensor(file: Path, stored: SafeTensor, name: str) -> torch.Tensor:
    target = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
    data = raw_bytes(target)
    if len(data) != stored.length:
        raise Damaged(f"{file}: {name} has {stored.length} bytes, but its shape needs {len(data)}")
    with file.open("rb") as opened:
        opened.seek(stored.offset)
        if opened.readinto(data) != len(data):
            raise Damaged(f"{file} ends inside {name}")
    return target


# -- torch.save


def _open_torch(files: list[Path], part: str | None) -> WeightSource:
    values: dict[str, Any] = {}
    for file in files:
        values |= model_in(_load(file), part, file)
    return _from_values("torch", values)


def _load(file: Path) -> Mapping[Any, Any]:
    zipped = is_archive(file)
    if zipped and (problem := archive_problem(file)) is not None:
        raise Damaged(f"{file} is damaged: {problem}")
    found = restricted(file, lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=zipped))
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{file} contains a {type(found).__name__}; model weights must be a dict of tensors by name"
        )
    return found


def restricted(file: Path, load: Callable[[], Any]) -> Any:
    """The result of ``load``, which reads ``file`` with torch's restricted loader.

    Raises:
        CheckpointError: the file is damaged, or contains objects of other types.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about pickle protocols; errors are still raised
            return load()
    except OSError:
        raise
    except Exception as error:  # a file of another kind may raise any error
        raise CheckpointError(
            f"{file} cannot be read as tensors and plain values; loading other types could run code: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    """The cause in an error of torch's loader, whose message begins with advice for callers of ``torch.load``."""
    text = str(error).strip() or type(error).__name__
    cause = text.partition("WeightsUnpickler error: ")[2].strip()
    if not cause and text.startswith("Weights only load failed"):
        cause = text.partition("\n\n")[2].strip()
    return (cause or text).splitlines()[0].partition(". Please use")[0].removesuffix(".")


def _from_values(kind: str, values: dict[str, Any]) -> WeightSource:
    """Build a source from loaded tensors. Tensors with the same memory, shape, strides and dtype become one weight."""
    names = plain_names(values)
    names_by_memory: dict[Any, list[str]] = {}
    tensors: dict[Any, torch.Tensor] = {}
    extra = {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            extra[names[key]] = value
            continue
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{key} is a {value.layout if not value.is_quantized else 'quantized'} tensor, which is not supported"
            )
        same = (value.data_ptr() or key, tuple(value.shape), value.stride(), value.dtype)
        names_by_memory.setdefault(same, []).append(names[key])
        tensors[same] = value.detach()
    weights = [
        Weight(own[0], tensors[same].dtype, tuple(tensors[same].shape), tensors[same].contiguous, tuple(own[1:]))
        for same, own in names_by_memory.items()
    ]
    return WeightSource(kind, weights, extra=extra)


# -- DCP


def open_dcp(path: Path, part: str | None) -> WeightSource:
    """Open a ``torch.distributed.checkpoint`` checkpoint.

    Args:
        part: see ``weights.model_in``.

    Raises:
        CheckpointError: the checkpoint is damaged, or it is not clear which entry is the model.
    """
    found = Dcp.read(path)
    nested: dict[str, Any] = {}
    for key in (*found.tensors, *found.values):
        *way, last = found.nested.get(key, (key,))
        inner = nested
        for part_key in way:
            inner = inner.setdefault(part_key, {})
            if not isinstance(inner, dict):
                raise Damaged(f"{path}: {key} is nested in {part_key}, which is not a dict")
        inner[last] = found.tensors.get(key, key), key
    model = model_in(nested, part, path)
    names = plain_names(model)
    notes, weights = [], []
    for name, (tensor, key) in model.items():
        if isinstance(tensor, DcpTensor):
            read = partial(_read_dcp, found, key)
            weights.append(Weight(names[name], dtype_of(tensor.dtype), tensor.shape, read))
        else:
            notes.append(f"{names[name]} is not a tensor and was omitted")
    return WeightSource("dcp", weights, notes)


def _read_dcp(found: Dcp, key: str) -> torch.Tensor:
    stored = found.tensors[key]
    target = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
    for at, shape in stored.chunks:
        if 0 in shape:
            continue
        chunk = read_chunk(found, key, at)
        target[tuple(slice(begin, begin + size) for begin, size in zip(at, shape, strict=True))] = chunk
    return target


def read_chunk(found: Dcp, key: str, at: tuple[int, ...]) -> torch.Tensor:
    """The chunk of a tensor that begins at offset ``at``.

    Raises:
        CheckpointError: the chunk is stored in an unsupported way.
        Damaged: the chunk is missing or damaged, or differs from its description.
    """
    stored = found.tensors[key]
    shape, dtype = dict(stored.chunks)[at], dtype_of(stored.dtype)
    chunk = _read_archive(found, key, at)
    if not isinstance(chunk, torch.Tensor):
        raise Damaged(f"{found.path}: the chunk of {key} at {list(at)} is not a tensor")
    if tuple(chunk.shape) != shape or chunk.dtype != dtype:
        raise Damaged(
            f"{found.path}: the chunk of {key} at {list(at)} has dtype {chunk.dtype} and shape "
            f"{list(chunk.shape)}, but the metadata describe {dtype} and {list(shape)}"
        )
    return chunk.detach()


def read_value(found: Dcp, key: str) -> Any:
    """A value that is not a tensor, such as a number or a list of names.

    Raises:
        CheckpointError: the value has another type, whose loading could run code.
        Damaged: the value is missing or damaged.
    """
    return _read_archive(found, key, None)


def _read_archive(found: Dcp, key: str, at: tuple[int, ...] | None) -> Any:
    what = key if at is None else f"the chunk of {key} at {list(at)}"
    place = found.places.get((key, at))
    if place is None:
        raise Damaged(f"{found.path}: {what} is missing")
    if place.transforms:
        raise CheckpointError(f"{key} is stored with {', '.join(place.transforms)}, which is not supported")
    file = found.file(place)
    if (problem := archive_problem(file, place.offset, place.length)) is not None:
        raise Damaged(f"{file} is damaged: {key} at byte {place.offset}: {problem}")
    with file.open("rb") as opened:
        opened.seek(place.offset)
        data = io.BytesIO(opened.read(place.length))
    return restricted(file, lambda: torch.load(data, map_location="cpu", weights_only=True))
