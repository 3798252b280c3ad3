"""Reader of a checkpoint without torch: its tensors, the location of their bytes, and the trees of its other values."""

from __future__ import annotations

import errno
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.errors import Damaged

__all__ = ["OWN_KEYS", "SHARED_TREE", "Chunk", "Contents", "StoredTensor", "item_bytes", "rank_tree", "tensor_nodes"]

SHARED_TREE = "tree"
"""Key of the tree shared by all ranks."""
OWN_KEYS = ("rank.", "tree.rank.")
"""Beginnings of the keys of a rank's own state."""

BLOCK_BYTES = 4 << 20
"""Size in bytes of the reads that verify a file."""

_ODD_SIZES = {"bool": 1, "bfloat16": 2, "float4_e2m1fn_x2": 1}


def rank_tree(rank: int) -> str:
    """Key of the tree with one rank's own state."""
    return f"{SHARED_TREE}.rank.{rank}"


def item_bytes(dtype: str) -> int:
    """Size in bytes of one element of the dtype with this name (``float32``, ``float8_e4m3fn``, ``complex64``)."""
    if dtype in _ODD_SIZES:
        return _ODD_SIZES[dtype]
    bits = dtype.split("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return max(1, int(bits) // 8) if bits.isdigit() else 1


def tensor_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All nodes of a tree that name a stored tensor in ``key``. Nodes of type ``tensor`` also have ``device``."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_nodes(item)
    elif isinstance(tree, dict):
        if "$" in tree and "key" in tree:
            yield tree
        else:
            for item in tree.values():
                yield from tensor_nodes(item)


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor at index ``at``. It is stored in ``file``, in ``stored`` bytes from byte ``offset`` on. The
    first ``length`` of these bytes are data, the others padding."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    stored: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: dtype, shape and chunks."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


class Contents:
    """The contents of a checkpoint, read on demand. The constructor reads only manifest and index.

    Args:
        manifest: the manifest, with the files of all blocks, if it has already been read and verified.

    Raises:
        Damaged: the manifest, a file's size or the index differs from the committed one.
        CheckpointError: a newer hpcaccel wrote the checkpoint.
    """

    def __init__(self, path: Path, manifest: dict[str, Any] | None = None) -> None:
        self.path = path
        self.manifest = sealed.read(path) if manifest is None else manifest
        found: dict[str, Any] = {}
        for name in sealed.index_names(self.manifest):
            for key, value in json.loads(sealed.read_listed(path, self.manifest["files"], name))["tensors"].items():
                found.setdefault(key, {**value, "chunks": []})["chunks"] += value["chunks"]
        self.tensors = {key: _tensor(key, value) for key, value in found.items()}

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The state shared by all ranks: ``models``, ``optimizers``, ``schedulers``, ``scaler``, ``objects``.

        Raises:
            Damaged: the bytes of this state differ from the committed ones.
        """
        found: dict[str, Any] = json.loads(self.read(SHARED_TREE))
        return found

    def of_rank(self, rank: int) -> dict[str, Any]:
        """One rank's own state: ``state`` and ``buffers``."""
        found: dict[str, Any] = json.loads(self.read(rank_tree(rank)))
        return found

    @property
    def ranks(self) -> list[int]:
        """The ranks that have their own state."""
        start = f"{SHARED_TREE}.rank."
        return sorted(int(key.removeprefix(start)) for key in self.tensors if key.startswith(start))

    def read(self, key: str) -> bytes:
        """All bytes of a tensor that consists of one chunk.

        Raises:
            Damaged: the bytes differ from the committed ones, or the tensor does not have exactly one chunk.
        """
        tensor = self.tensors.get(key)
        if tensor is None or len(tensor.chunks) != 1:
            count = 0 if tensor is None else len(tensor.chunks)
            raise Damaged(f"{self.path / sealed.INDEX} is damaged: it lists {count} chunks of {key} instead of one")
        data = bytearray(tensor.chunks[0].length)
        self.read_chunk(tensor.chunks[0], memoryview(data), key)
        return bytes(data)

    def read_chunk(self, chunk: Chunk, target: memoryview, key: str) -> None:
        """Read a chunk into ``target``, a buffer of ``chunk.length`` bytes, and verify its CRC.

        Raises:
            Damaged: the file is missing, the disk reports an I/O error, or the bytes differ from the committed ones.
        """
        where = self.path / chunk.file
        padding = bytearray(chunk.stored - chunk.length)
        try:
            with where.open("rb", buffering=0) as file:
                file.seek(chunk.offset)
                complete = _fill(file, target) and _fill(file, memoryview(padding))
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOENT):
                raise
            raise Damaged(f"{where} cannot be read: {error.strerror}") from None
        if not complete:
            raise Damaged(f"{where} ends before byte {chunk.offset + chunk.stored}, inside {key}")
        if zlib.crc32(padding, zlib.crc32(target)) != chunk.crc32:
            raise Damaged(
                f"{where} is damaged: the CRC of {key} ({chunk.stored} bytes from byte {chunk.offset}) differs from "
                "the committed CRC"
            )


def _tensor(key: str, value: dict[str, Any]) -> StoredTensor:
    chunks = tuple(
        Chunk(
            tuple(chunk["at"]),
            tuple(chunk["shape"]),
            chunk["file"],
            chunk["offset"],
            chunk["length"],
            chunk["stored"],
            int(chunk["crc32"], 16),
        )
        for chunk in value["chunks"]
    )
    return StoredTensor(key, value["dtype"], tuple(value["shape"]), chunks)


def _fill(file: Any, target: memoryview) -> bool:
    """Fill ``target``, in several reads: one read(2) returns at most 2 GiB. Returns False if the file is too short."""
    done = 0
    while done < len(target):
        got = file.readinto(target[done : done + (1 << 30)])
        if not got:
            return False
        done += got
    return True
