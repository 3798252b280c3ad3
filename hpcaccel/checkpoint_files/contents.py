"""What a checkpoint holds, without torch: its tensors, where their bytes lie, and the trees that say what they are."""

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

__all__ = ["SHARED_TREE", "Chunk", "Contents", "StoredTensor", "item_bytes", "rank_tree", "tensor_nodes"]

SHARED_TREE = "tree"
"""The key of the tree that all ranks share."""

BLOCK_BYTES = 4 << 20

_ODD_SIZES = {"bool": 1, "bfloat16": 2, "float4_e2m1fn_x2": 1}


def rank_tree(rank: int) -> str:
    """The key of a rank's own tree."""
    return f"{SHARED_TREE}.rank.{rank}"


def item_bytes(dtype: str) -> int:
    """Bytes of one element, from the name of its dtype: ``float32``, ``float8_e4m3fn``, ``complex64``."""
    if dtype in _ODD_SIZES:
        return _ODD_SIZES[dtype]
    bits = dtype.split("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return max(1, int(bits) // 8) if bits.isdigit() else 1


def tensor_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All nodes of a tree that point to a stored tensor; each has ``key`` and, for tensors, ``device``."""
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
    """A box of a tensor: from ``at`` on, ``shape`` long; ``length`` of the ``stored`` bytes in ``file`` are its own."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    stored: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a checkpoint."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


class Contents:
    """An open checkpoint. Nothing but manifest and index is read until it is asked for.

    Raises:
        Damaged: manifest, sizes or index are not what was committed.
        CheckpointError: a newer hpcaccel wrote it.
    """

    def __init__(self, path: Path, manifest: dict[str, Any] | None = None) -> None:
        self.path = path
        self.manifest = sealed.read(path) if manifest is None else manifest
        text = sealed.read_index(path, self.manifest)
        self.tensors = {key: _tensor(key, value) for key, value in json.loads(text)["tensors"].items()}

    @cached_property
    def tree(self) -> dict[str, Any]:
        """What all ranks share: ``models``, ``optimizers``, ``schedulers``, ``scaler``, ``objects``.

        Raises:
            Damaged: its bytes are not what was committed.
        """
        found: dict[str, Any] = json.loads(self.read(SHARED_TREE))
        return found

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What a rank had of its own: ``state`` and ``buffers``."""
        found: dict[str, Any] = json.loads(self.read(rank_tree(rank)))
        return found

    @property
    def ranks(self) -> list[int]:
        """The ranks that have something of their own in it."""
        start = f"{SHARED_TREE}.rank."
        return sorted(int(key.removeprefix(start)) for key in self.tensors if key.startswith(start))

    def read(self, key: str) -> bytes:
        """All bytes of a tensor that is one chunk.

        Raises:
            Damaged: they are not what was committed.
        """
        tensor = self.tensors.get(key)
        if tensor is None or len(tensor.chunks) != 1:
            raise Damaged(f"{self.path / sealed.INDEX} does not say where {key} lies")
        data = bytearray(tensor.chunks[0].length)
        self.read_chunk(tensor.chunks[0], memoryview(data), key)
        return bytes(data)

    def read_chunk(self, chunk: Chunk, target: memoryview, key: str) -> None:
        """Fill ``target``, which has the chunk's length.

        Raises:
            Damaged: the bytes are not what was committed.
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
                f"{where} is damaged: {key}, {chunk.stored} bytes from byte {chunk.offset} on, has another CRC than "
                "when it was committed"
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
    """Whether the file had so many bytes. One read gives at most 2 GiB."""
    done = 0
    while done < len(target):
        got = file.readinto(target[done : done + (1 << 30)])
        if not got:
            return False
        done += got
    return True
