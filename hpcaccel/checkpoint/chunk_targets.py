"""Stored chunks and the tensors that they are read into: copies of their bytes, the check of their CRCs, and new memory
into which direct I/O reads without a buffer in between."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcaccel.checkpoint.huge_pages import begins_huge_page, huge_pages
from hpcaccel.checkpoint.manifest_writer import Index, Piece
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, copy_bytes, crc32
from hpcaccel.checkpoint.snapshot_memory import raw_bytes
from hpcaccel.checkpoint_files.manifest import combined_crc
from hpcaccel.errors import Damaged

__all__ = ["ChunkTarget", "Copied", "chunk_targets", "empty_aligned", "wrong_crc"]

STEP_BYTES = 1 << 18
"""Data is copied in steps of this size. The CRC of a step is computed while the step is in the CPU cache."""

LEAST_ALIGNED_BYTES = 8 << 20
"""Smaller tensors are allocated by torch."""

DEVICES = ("cpu", "cuda")
"""Devices whose tensors receive their bytes in steps. Other devices receive whole chunks."""


class ChunkTarget:
    """A stored chunk, and the tensors that it, or a part of it, is read into.

    Args:
        stored: the tensor that the chunk belongs to.
    """

    def __init__(self, piece: Piece, stored: TensorStorageMetadata, item: ReadItem) -> None:
        self.piece = piece
        self.key = item.storage_index.fqn
        self._dtype = stored.properties.dtype
        self._sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == item.storage_index.offset)
        self._copies: list[_Copy] = []
        self._crcs: dict[int, tuple[int, int]] = {}
        self._left = piece.stored
        self._lock = threading.Lock()

    def add(self, item: ReadItem, target: torch.Tensor) -> None:
        """Copy the part that ``item`` describes to ``target`` too."""
        part = self._range(item)
        same = target.dtype == self._dtype and not target.is_conj() and not target.is_neg()
        if part is not None and same and target.is_contiguous() and target.device.type in DEVICES:
            self._copies.append(_Copy(target.detach(), *part))
            return
        whole = torch.empty(self.piece.length, dtype=torch.uint8)

        def finish() -> None:
            source = whole.view(self._dtype).reshape(self._sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target.copy_(source)

        self._copies.append(_Copy(whole, 0, self.piece.length, finish))

    def _range(self, item: ReadItem) -> tuple[int, int] | None:
        """Begin and end of the item's bytes in the chunk; None if they are not contiguous in it."""
        if tuple(item.lengths[1:]) != tuple(self._sizes[1:]):
            return None
        row = math.prod(self._sizes[1:]) * self._dtype.itemsize
        begin = (item.storage_offsets[0] if len(item.lengths) else 0) * row
        return begin, begin + math.prod(item.lengths) * self._dtype.itemsize

    def memory(self, begin: int, end: int) -> memoryview | None:
        """The memory into which the bytes from ``begin`` to ``end`` can be read without a buffer: as many of them as
        are whole blocks in the file. None if the memory does not have the alignment of the file, or does not begin
        as a huge page does: direct reads into pages of 4 KiB take longer than a copy from a buffer in huge pages."""
        if len(self._copies) != 1:
            return None
        return self._copies[0].aligned(begin, end, self.piece.offset)

    def put(self, at: int, data: memoryview, crc: int = 0) -> int:
        """Copy the chunk's bytes from ``at`` on to the tensors. Returns their CRC, continued from ``crc``."""
        for start in range(0, len(data), STEP_BYTES):
            step = data[start : start + STEP_BYTES]
            for copy in self._copies:
                copy.put(at + start, step)
            crc = crc32(step, crc)
        return crc

    def check(self, copied: Copied, path: Path) -> None:
        """Record that bytes have been copied. After the last bytes, check the CRC of the chunk.

        Raises:
            Damaged: it differs from the committed one.
        """
        with self._lock:
            self._crcs[copied.at] = (copied.crc, copied.length)
            self._left -= copied.length
            if self._left:
                return
        if combined_crc(part for _, part in sorted(self._crcs.items())) != self.piece.crc32:
            raise wrong_crc(path, self.piece, self.key)
        for copy in self._copies:
            copy.finish()


class _Copy:
    """The copy of a chunk's bytes from ``begin`` to ``end`` to the memory of a contiguous tensor."""

    def __init__(self, tensor: torch.Tensor, begin: int, end: int, finish: Callable[[], None] = lambda: None) -> None:
        self._begin, self._end = begin, end
        self._flat = tensor.reshape(-1).view(torch.uint8)
        self._host = raw_bytes(self._flat) if tensor.device.type == "cpu" else None
        self.finish = finish

    def put(self, at: int, data: memoryview) -> None:
        start, stop = max(at, self._begin), min(at + len(data), self._end)
        if start >= stop:
            return
        source, first, last = data[start - at : stop - at], start - self._begin, stop - self._begin
        if self._host is not None:
            copy_bytes(self._host[first:last], source)
        else:
            self._flat[first:last].copy_(torch.frombuffer(source, dtype=torch.uint8))

    def aligned(self, begin: int, end: int, offset: int) -> memoryview | None:
        """See ``ChunkTarget.memory``; ``offset`` is that of the chunk in the file."""
        if self._host is None or begin < self._begin or self._end <= begin:
            return None
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        if not begins_huge_page(first) or (first - self._begin - offset) % BLOCK_BYTES:
            return None
        start = begin + -(offset + begin) % BLOCK_BYTES
        stop = min(end, self._end)
        stop -= (offset + stop) % BLOCK_BYTES
        return self._host[start - self._begin : stop - self._begin] if start < stop else None


class Copied(NamedTuple):
    """Bytes of a chunk that have been copied: ``length`` bytes from ``at`` on, and their CRC."""

    chunk: ChunkTarget
    at: int
    crc: int
    length: int


def chunk_targets(
    work: Iterable[tuple[Piece, ReadItem, torch.Tensor]], stored: Callable[[str], TensorStorageMetadata]
) -> list[ChunkTarget]:
    """The chunks to read, by file and offset.

    Args:
        work: what to read: a chunk, the item of the plan, and its tensor.
        stored: the tensor with a key.
    """
    found: dict[tuple[str, int], ChunkTarget] = {}
    for piece, item, target in sorted(work, key=lambda each: (each[0].file, each[0].offset)):
        if piece.stored:
            place = (piece.file, piece.offset)
            if place not in found:
                found[place] = ChunkTarget(piece, stored(item.storage_index.fqn), item)
            found[place].add(item, target)
    return list(found.values())


def wrong_crc(path: Path, piece: Piece, key: str) -> Damaged:
    return Damaged(
        f"{path} is damaged: the CRC of {key} ({piece.stored} bytes from byte {piece.offset}) differs from the "
        "committed CRC"
    )


def empty_aligned(like: torch.Tensor, key: str, index: Index) -> torch.Tensor:
    """An uninitialised tensor for a stored one, with its dtype and the shape, device and sharding of ``like``. A large
    one on the CPU lies in huge pages, and its address has the alignment of its bytes in the file."""
    dtype = index.tensor(key).properties.dtype
    local = like.to_local() if isinstance(like, DTensor) else like
    size = local.numel() * dtype.itemsize
    if local.device.type != "cpu" or size < LEAST_ALIGNED_BYTES or not local.is_contiguous():
        return torch.empty_like(like, dtype=dtype)
    offset = (0,) * like.ndim
    if isinstance(like, DTensor):
        _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    piece = index.pieces.get(MetadataIndex(key, torch.Size(offset)))
    remainder = 0 if piece is None else piece.offset % BLOCK_BYTES
    memory = torch.frombuffer(huge_pages(size, remainder=remainder), dtype=dtype).reshape(local.shape)
    if not isinstance(like, DTensor):
        return memory
    return DTensor.from_local(
        memory, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
