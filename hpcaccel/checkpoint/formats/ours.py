"""Checkpoints of hpcaccel as source and as target."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import manifest_writer
from hpcaccel.checkpoint.crc import crc32
from hpcaccel.checkpoint.dcp_storage import ALIGNMENT_BYTES, rank_file, raw_bytes
from hpcaccel.checkpoint.formats.weights import Source, Weight
from hpcaccel.checkpoint.manifest_writer import FileRecord, Index, Piece
from hpcaccel.checkpoint.tree import dtype_of, unpack
from hpcaccel.checkpoint_files.contents import SHARED_TREE, Contents
from hpcaccel.core.run_dir import DIRECTORY_MODE, FILE_MODE, atomic_write, fsync_directory
from hpcaccel.errors import CheckpointError

__all__ = ["open_ours", "read_tensor", "write_ours"]

WEIGHTS_ONLY = "weights_only"
"""In a tree: there is a model and nothing else, for it was imported."""


# -- as source


def open_ours(path: Path, number: int | None) -> Source:
    """The weights of model ``number``; of the only one where that is None.

    Raises:
        CheckpointError: there is no such model, or a hook of the script's has saved it in its own way.
    """
    contents = Contents(path)
    models = contents.tree["models"]
    if number is None and len(models) != 1:
        raise CheckpointError(f"{path} holds {len(models)} models: say which one with --model, from 0 on")
    number = number or 0
    if number >= len(models):
        raise CheckpointError(f"{path} has no model {number} (it holds {len(models)}, counted from 0)")
    if models[number] is None:
        raise CheckpointError(f"{path}: model {number} was saved by a hook of the script's, in a format of its own")
    return _source(contents, models[number])


def _source(contents: Contents, model: dict[str, Any]) -> Source:
    names: dict[str, list[str]] = {}
    extra = {}
    for name, node in model.items():
        if isinstance(node, dict) and node.get("$") == "tensor":
            names.setdefault(node["key"], []).append(name)
        else:
            extra[name] = unpack(node, lambda key: read_tensor(contents, key))
    return Source("hpcaccel", [lazy(contents, key, *own) for key, own in names.items()], extra=extra)


def lazy(contents: Contents, key: str, name: str, *ties: str) -> Weight:
    stored = contents.tensors.get(key)
    if stored is None:
        raise CheckpointError(f"{contents.path}: the bytes of {key} are nowhere")
    return Weight(name, dtype_of(stored.dtype), stored.shape, lambda: read_tensor(contents, key), ties)


def read_tensor(contents: Contents, key: str) -> torch.Tensor:
    """A whole tensor, put together from its chunks.

    Raises:
        Damaged: its bytes are not what was committed.
    """
    stored = contents.tensors[key]
    target = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
    for chunk in stored.chunks:
        if not chunk.length:
            continue
        part = target[tuple(slice(at, at + size) for at, size in zip(chunk.at, chunk.shape, strict=True))]
        if part.is_contiguous():
            contents.read_chunk(chunk, raw_bytes(part), key)
            continue
        whole = torch.empty(chunk.shape, dtype=target.dtype)
        contents.read_chunk(chunk, raw_bytes(whole), key)
        part.copy_(whole)
    return target


# -- as target


def write_ours(target: Path, source: Source, *, origin: str, wrote: Callable[[int], None]) -> list[str]:
    """Make a checkpoint of a model's weights, from which a training can begin; the names of its files.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.mkdir(mode=DIRECTORY_MODE, parents=True)
    try:
        files = _write_files(temporary, source, origin, wrote)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(target.parent)
    return files


def _write_files(directory: Path, source: Source, origin: str, wrote: Callable[[int], None]) -> list[str]:
    nodes = {weight: {"$": "tensor", "key": f"models.0.{weight.name}", "device": "cpu"} for weight in source.weights}
    model = {name: node for weight, node in nodes.items() for name in (weight.name, *weight.ties)}
    empty: dict[str, Any] = {"optimizers": [], "schedulers": [], "scaler": None, "objects": {}}
    text = json.dumps({"models": [model], **empty, WEIGHTS_ONLY: True}).encode()
    name = rank_file(0)
    fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        writer = _Writer(file, name)
        for weight in source.weights:
            writer.add(f"models.0.{weight.name}", weight.read())
            wrote(weight.bytes)
        writer.add(SHARED_TREE, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        file.flush()
        os.fsync(file.fileno())
    index = writer.index().to_json()
    atomic_write(directory / manifest_writer.INDEX, index)
    content = manifest_writer.build(
        files=[writer.record(), FileRecord(manifest_writer.INDEX, len(index), crc32(index))],
        step=0,
        epoch=0,
        reason="imported",
        guarantee="state-exact",
        world_size=1,
        attempt=0,
        imported_from=origin,
        holds=["weights"],
    )
    atomic_write(directory / checkpoint_files.MANIFEST, manifest_writer.seal(content))
    return [name, manifest_writer.INDEX, checkpoint_files.MANIFEST]


class _Writer:
    """Tensors one behind the other in one file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._offset = self._crc = 0
        self._metadata: dict[str, Any] = {}
        self._pieces: dict[MetadataIndex, Piece] = {}

    def add(self, key: str, tensor: torch.Tensor) -> None:
        data = raw_bytes(tensor)
        padding = bytes(-len(data) % ALIGNMENT_BYTES)
        self._file.write(data)
        self._file.write(padding)
        stored = len(data) + len(padding)
        piece = Piece(self._name, self._offset, len(data), stored, crc32(padding, crc32(data)))
        at = torch.Size([0] * tensor.dim())
        self._pieces[MetadataIndex(key, at)] = piece
        chunk = ChunkStorageMetadata(offsets=at, sizes=tensor.shape)
        self._metadata[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])
        self._crc = crc32(padding, crc32(data, self._crc))
        self._offset += stored

    def index(self) -> Index:
        return Index(Metadata(self._metadata), self._pieces)

    def record(self) -> FileRecord:
        return FileRecord(self._name, self._offset, self._crc)
