"""hpcaccel checkpoints as the source and as the target of a conversion."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit, manifest_writer
from hpcaccel.checkpoint.dcp_storage import ALIGNMENT_BYTES, raw_bytes
from hpcaccel.checkpoint.formats.weights import Weight, WeightSource
from hpcaccel.checkpoint.shard_files import crc32, rank_file
from hpcaccel.checkpoint.tree import dtype_name, dtype_of, unpack
from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.contents import SHARED_TREE, Contents
from hpcaccel.core.durable_files import DIRECTORY_MODE, FILE_MODE, fsync_directory
from hpcaccel.errors import CheckpointError

__all__ = ["open_ours", "read_tensor", "whole_state", "write_ours"]

WEIGHTS_ONLY = "weights_only"
"""Key in the shared tree of an imported checkpoint, which contains only a model."""


# -- as source


def open_ours(path: Path, number: int | None) -> WeightSource:
    """Open the weights of model ``number``, counted from 0. With None, the checkpoint must contain exactly one model.

    Raises:
        CheckpointError: there is no such model, ``number`` is None but there is not exactly one model, or the script's
            save hook saved the model in its own format.
    """
    contents = Contents(path)
    models = contents.tree["models"]
    if number is None and len(models) != 1:
        raise CheckpointError(f"{path} contains {len(models)} models: select one with --model, counted from 0")
    number = number or 0
    if number >= len(models):
        raise CheckpointError(f"{path} has no model {number} (models are counted from 0; it contains {len(models)})")
    if models[number] is None:
        raise CheckpointError(f"{path}: model {number} was saved by the script's save hook, in its own format")
    return _source(contents, models[number])


def _source(contents: Contents, model: dict[str, Any]) -> WeightSource:
    names: dict[str, list[str]] = {}
    extra = {}
    for name, node in model.items():
        if isinstance(node, dict) and node.get("$") == "tensor":
            names.setdefault(node["key"], []).append(name)
        else:
            extra[name] = unpack(node, lambda key: read_tensor(contents, key))
    return WeightSource("hpcaccel", [lazy(contents, key, *own) for key, own in names.items()], extra=extra)


def lazy(contents: Contents, key: str, name: str, *ties: str) -> Weight:
    stored = contents.tensors.get(key)
    if stored is None:
        raise CheckpointError(f"{contents.path}: {key} is not in the index")
    return Weight(name, dtype_of(stored.dtype), stored.shape, lambda: read_tensor(contents, key), ties)


def read_tensor(contents: Contents, key: str) -> torch.Tensor:
    """A whole tensor, assembled from its chunks.

    Raises:
        Damaged: the tensor's bytes differ from the committed ones.
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


# -- as source, the whole training


def whole_state(contents: Contents) -> dict[str, Any]:
    """The complete training state as nested dicts of plain values, in which each tensor is a ``Weight``.

    Returns:
        A dict: ``models`` and ``optimizers`` in the layout that ``load_state_dict`` expects, ``schedulers``,
        ``scaler``, ``objects``, ``ranks`` with each rank's own state, and ``manifest``.
    """
    tree, plain = contents.tree, _Plain(contents)
    return {
        "models": [None if model is None else plain(model) for model in tree["models"]],
        "optimizers": [_optimizer(optimizer, plain) for optimizer in tree["optimizers"]],
        "schedulers": [plain(item) for item in tree["schedulers"]],
        "scaler": plain(tree["scaler"]),
        "objects": {name: plain(item) for name, item in tree["objects"].items()},
        "ranks": {rank: plain(contents.of_rank(rank)) for rank in contents.ranks},
        "manifest": {key: value for key, value in contents.manifest.items() if key not in ("files", "crc32")},
    }


def _optimizer(saved: dict[str, Any], plain: _Plain) -> dict[str, Any]:
    """An optimizer's state dict in torch's layout: parameters by number, in the order of the groups."""
    names = [name for members in saved["members"] for name in members]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {numbers[name]: plain(value) for name, value in saved["state"].items()}
    state |= dict(plain(saved["other"]))
    groups = [
        {**plain(group), "params": [numbers[name] for name in members], "param_names": list(members)}
        for group, members in zip(saved["groups"], saved["members"], strict=True)
    ]
    loose = {key: plain({"$": "tensor", "key": key}) for key in saved["loose"]}  # parameters that belong to no model
    return {**plain(saved["extra"]), "state": state, "param_groups": groups, **({"loose": loose} if loose else {})}


class _Plain:
    """Converts trees to values of types that torch's restricted loader accepts."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._weights: dict[str, Any] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self(item) for key, item in tree.items()}
        return self._typed(tree)

    def _typed(self, node: dict[str, Any]) -> Any:
        kind = node["$"]
        if kind == "tensor":
            key = node["key"]
            return self._weights.setdefault(key, lazy(self._contents, key, key))
        if kind in ("dict", "ordered_dict", "counter", "default_dict"):
            return {self(key): self(item) for key, item in node["items"]}
        if kind in ("set", "frozenset"):
            return {self(item) for item in node["items"]}
        if kind == "tuple":
            return tuple(self(item) for item in node["items"])
        if kind in ("deque", "size"):
            return [self(item) for item in node["items"]]
        value = unpack(node, lambda key: read_tensor(self._contents, key))
        if kind == "numpy_scalar":
            return _scalar(value)
        return self._array(node, value) if kind == "array" else value

    def _array(self, node: dict[str, Any], value: Any) -> Any:
        """A NumPy array as a ``Weight`` if torch has its dtype, else as a flat list."""
        try:
            tensor = torch.from_numpy(value)
        except TypeError:
            return [_scalar(item) for item in value.reshape(-1)]
        return Weight(node["key"], tensor.dtype, tuple(tensor.shape), tensor.contiguous)


def _scalar(value: Any) -> Any:
    plain = value.item()
    return plain if isinstance(plain, bool | int | float | complex | str | bytes) else str(value)


# -- as target


def write_ours(target: Path, source: WeightSource, *, origin: str, wrote: Callable[[int], None]) -> list[str]:
    """Write an hpcaccel checkpoint that contains only a model's weights. Training can start from it.

    Args:
        origin: kind and path of the source, for the manifest.
        wrote: called with the size in bytes of each tensor after it is written.

    Returns:
        The names of the files written.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} already exists; a checkpoint is never overwritten. Choose another directory")
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


def _write_files(directory: Path, source: WeightSource, origin: str, wrote: Callable[[int], None]) -> list[str]:
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
    facts = manifest_writer.describe(
        step=0,
        epoch=0,
        reason="imported",
        guarantee="state-exact",
        world_size=1,
        attempt=0,
        imported_from=origin,
        holds=["weights"],
    )
    commit.write_manifest(directory, files=[writer.written()], facts=facts)
    return [name, manifest.INDEX, checkpoint_files.MANIFEST]


class _Writer:
    """Writes tensors one after the other into a file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._crcs: list[int] = []
        self._lengths: list[int] = []
        self._chunks: list[PlannedChunk] = []

    def add(self, key: str, tensor: torch.Tensor) -> None:
        data = raw_bytes(tensor)
        padding = bytes(-len(data) % ALIGNMENT_BYTES)
        self._file.write(data)
        self._file.write(padding)
        self._crcs.append(crc32(padding, crc32(data)))
        self._lengths.append(len(data) + len(padding))
        shape, begin = list(tensor.shape), [0] * tensor.dim()
        self._chunks.append(PlannedChunk(key, dtype_name(tensor.dtype), shape, begin, shape, len(data)))

    def written(self) -> WrittenFile:
        return WrittenFile.of(self._name, self._crcs, self._lengths, self._chunks)
