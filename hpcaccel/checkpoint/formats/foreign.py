"""What other programs have saved, as source. No code in their files is run: torch's restricted loader reads pickles."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.dcp_storage import raw_bytes
from hpcaccel.checkpoint.formats.weights import Source, Weight, model_in, plain_names
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.dcp_reader import Dcp, DcpTensor
from hpcaccel.checkpoint_files.safetensors_reader import SafeTensor, read_head
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.checkpoint_files.verify import weight_files
from hpcaccel.checkpoint_files.weight_files import SAFE, TORCH
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["open_dcp", "open_files"]


def open_files(path: Path, part: str | None) -> Source:
    """A file of weights, or a directory with a model's.

    Raises:
        CheckpointError: nothing of that kind, several kinds, or something that cannot be read.
    """
    files = weight_files(path)
    _refuse_gaps(path, files)
    if path.is_dir() and len(files) > 1 and not any(form.owns(files[0].name) for form in (SAFE, TORCH)):
        raise CheckpointError(
            f"{path} holds several files of weights: {', '.join(item.name for item in files)}. Name one"
        )
    if files[0].suffix == ".safetensors":
        return _open_safetensors(files)
    return _open_torch(files, part)


def _refuse_gaps(path: Path, files: list[Path]) -> None:
    for form in (SAFE, TORCH):
        index = path / form.index_name
        if not path.is_dir() or not index.is_file() or not form.owns(files[0].name):
            continue
        wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        if lost := sorted(wanted - {item.name for item in files}):
            raise Damaged(f"{index} names {', '.join(map(str, lost))}, which is not there")


# -- safetensors


def _open_safetensors(files: list[Path]) -> Source:
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
    return Source("safetensors", weights)


def _read_safetensor(file: Path, stored: SafeTensor, name: str) -> torch.Tensor:
    target = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
    data = raw_bytes(target)
    if len(data) != stored.length:
        raise Damaged(f"{file}: {name} has {stored.length} bytes, {len(data)} belong to its shape")
    with file.open("rb") as opened:
        opened.seek(stored.offset)
        if opened.readinto(data) != len(data):
            raise Damaged(f"{file} ends inside {name}")
    return target


# -- torch.save


def _open_torch(files: list[Path], part: str | None) -> Source:
    values: dict[str, Any] = {}
    for file in files:
        values |= model_in(_load(file), part, file)
    return _from_values("torch", values)


def _load(file: Path) -> Mapping[Any, Any]:
    zipped = is_archive(file)
    if zipped and (problem := archive_problem(file)) is not None:
        raise Damaged(f"{file} is damaged: {problem}")
    found = _restricted(file, lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=zipped))
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file} holds a {type(found).__name__}; a model's weights are a dict of tensors by name")
    return found


def _restricted(file: Path, load: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles in another protocol, which end below or are fine
            return load()
    except OSError:
        raise
    except Exception as error:  # what is no file of torch's fails in any way whatsoever
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{file} cannot be read as tensors and plain values, and loading anything else would run code: {first}"
        ) from None


def _from_values(kind: str, values: dict[str, Any]) -> Source:
    """Tensors that are one in memory become one with ties; what is no tensor is left out."""
    names = plain_names(values)
    known: dict[Any, list[str]] = {}
    tensors: dict[Any, torch.Tensor] = {}
    extra = {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            extra[names[key]] = value
            continue
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{key} is a {value.layout if not value.is_quantized else 'quantized'} tensor: not supported"
            )
        same = (value.data_ptr() or key, tuple(value.shape), value.stride(), value.dtype)
        known.setdefault(same, []).append(names[key])
        tensors[same] = value.detach()
    weights = [
        Weight(own[0], tensors[same].dtype, tuple(tensors[same].shape), tensors[same].contiguous, tuple(own[1:]))
        for same, own in known.items()
    ]
    return Source(kind, weights, extra=extra)


# -- DCP


def open_dcp(path: Path, part: str | None) -> Source:
    """A checkpoint of ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: it is damaged, or its model cannot be told from the rest.
    """
    found = Dcp.read(path)
    nested: dict[str, Any] = {}
    for key in (*found.tensors, *found.values):
        *way, last = found.nested.get(key, (key,))
        inner = nested
        for word in way:
            inner = inner.setdefault(word, {})
            if not isinstance(inner, dict):
                raise Damaged(f"{path}: {key} would be inside of {word}, which is a value itself")
        inner[last] = found.tensors.get(key, key), key
    model = model_in(nested, part, path)
    names = plain_names(model)
    notes, weights = [], []
    for name, (tensor, key) in model.items():
        if isinstance(tensor, DcpTensor):
            read = partial(_read_dcp, found, key)
            weights.append(Weight(names[name], dtype_of(tensor.dtype), tensor.shape, read))
        else:
            notes.append(f"{names[name]} is no tensor and left out")
    return Source("dcp", weights, notes)


def _read_dcp(found: Dcp, key: str) -> torch.Tensor:
    stored = found.tensors[key]
    target = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
    for at, shape in stored.chunks:
        if 0 in shape:
            continue
        chunk = _read_chunk(found, key, at)
        if tuple(chunk.shape) != shape or chunk.dtype != target.dtype:
            raise Damaged(f"{found.path}: {key} at {list(at)} is {chunk.dtype} of shape {list(chunk.shape)}")
        target[tuple(slice(begin, begin + size) for begin, size in zip(at, shape, strict=True))] = chunk
    return target


def _read_chunk(found: Dcp, key: str, at: tuple[int, ...]) -> torch.Tensor:
    place = found.places.get((key, at))
    if place is None:
        raise Damaged(f"{found.path}: the chunk of {key} at {list(at)} is nowhere")
    if place.transforms:
        raise CheckpointError(f"{key} is stored with {', '.join(place.transforms)}, which is not supported")
    file = found.file(place)
    if (problem := archive_problem(file, place.offset, place.length)) is not None:
        raise Damaged(f"{file} is damaged: {key} at byte {place.offset}: {problem}")
    with file.open("rb") as opened:
        opened.seek(place.offset)
        data = io.BytesIO(opened.read(place.length))
    value = _restricted(file, lambda: torch.load(data, map_location="cpu", weights_only=True))
    if not isinstance(value, torch.Tensor):
        raise Damaged(f"{file}: {key} at byte {place.offset} is no tensor")
    return value.detach()
