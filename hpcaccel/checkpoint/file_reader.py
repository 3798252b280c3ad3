"""Reading a checkpoint's files: in large pieces, by several threads, every byte checked."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import ReadItem

from hpcaccel.checkpoint.crc import crc32
from hpcaccel.checkpoint.manifest_writer import Piece
from hpcaccel.checkpoint.snapshot_memory import STEP_BYTES, copy_bytes
from hpcaccel.checkpoint.writer_files import BLOCK_BYTES, give_up_direct, open_direct, up_to_block
from hpcaccel.errors import Damaged

__all__ = ["Batch", "StoredFile", "batches", "check", "other_crc", "read_into"]

BOUNCE_BYTES = 8 << 20
"""What a thread reads at a time."""

BATCH_BYTES = 1 << 20
"""Small chunks are read together, in one read of this size at most; larger ones by themselves."""


class StoredFile:
    """A file of a checkpoint, read from anywhere in it by several threads.

    With direct I/O where the file system has it: nobody needs these bytes a second time, and a cache that takes them in
    costs more than the copy from here to the tensor.

    Raises:
        Damaged: it is missing, too short, or the disk cannot read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor, self._direct = open_direct(path, os.O_RDONLY)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None

    def announce(self, offset: int, length: int) -> None:
        """Let the disk begin: the cache reads ahead of those who check. Direct reads are long enough."""
        if not self._direct:
            os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, length: int, key: str) -> bytearray:
        """These bytes; ``key`` names what they belong to in errors."""
        data = bytearray()
        for part in self.parts(offset, length, key):
            data += part
        return data

    def parts(self, offset: int, length: int, key: str) -> Iterator[memoryview]:
        """These bytes piece by piece, each gone when the next one is asked for."""
        end = offset + length
        memory = _bounce(min(up_to_block(length + BLOCK_BYTES), BOUNCE_BYTES))
        while offset < end:
            skip = offset % BLOCK_BYTES
            wanted = min(up_to_block(skip + end - offset), len(memory))
            count = min(self._pread(memory[:wanted], offset - skip), skip + end - offset) - skip
            if count <= 0:
                raise Damaged(f"{self.path} ends before byte {end}, inside {key}")
            yield memory[skip : skip + count]
            offset += count

    def _pread(self, memory: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.descriptor, [memory], offset)
        except OSError as error:
            if error.errno == errno.EIO:
                raise Damaged(f"{self.path} cannot be read at byte {offset}: {error.strerror}") from None
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._direct = False
        give_up_direct(self.descriptor)
        return os.preadv(self.descriptor, [memory], offset)


def read_into(target: memoryview, parts: Iterator[memoryview]) -> int:
    """Copy what ``parts`` gives to ``target``, as far as it reaches; the CRC32 of all of it."""
    crc, done = 0, 0
    for part in parts:
        for start in range(0, len(part), STEP_BYTES):  # checked while it is in the processor's cache
            step = part[start : start + STEP_BYTES]
            copy_bytes(target[done : done + len(step)], step)
            crc = crc32(step, crc)
            done += len(step)
    return crc


_own = threading.local()


def _bounce(size: int) -> memoryview:
    """Aligned memory of this thread, used again: fresh pages cost more than what is read into them."""
    if len(getattr(_own, "memory", b"")) < size:
        _own.memory = memoryview(mmap.mmap(-1, size))
    found: memoryview = _own.memory
    return found[:size]


@dataclass
class Batch:
    """What is read in one go: one chunk, or small ones that lie close together in one file."""

    pieces: list[Piece]
    items: list[ReadItem]
    targets: list[torch.Tensor]
    file: StoredFile | None = None
    later: Batch | None = None
    """Whose turn comes when those are done that are read now."""

    @property
    def end(self) -> int:
        return max(piece.offset + piece.stored for piece in self.pieces)

    def announce(self) -> None:
        """Let the disk begin: it reads ahead of those who check."""
        assert self.file is not None
        begin = self.pieces[0].offset
        self.file.announce(begin, self.end - begin)


def batches(work: list[tuple[Piece, ReadItem]], targets: list[torch.Tensor]) -> Iterator[Batch]:
    batch: Batch | None = None
    for (piece, item), target in zip(work, targets, strict=True):
        if batch is not None:
            same = batch.pieces[0].file == piece.file
            if same and max(batch.end, piece.offset + piece.stored) - batch.pieces[0].offset <= BATCH_BYTES:
                batch.pieces.append(piece)
                batch.items.append(item)
                batch.targets.append(target)
                continue
            yield batch
        batch = Batch([piece], [item], [target])
    if batch is not None:
        yield batch


def check(path: Path, piece: Piece, key: str, stored: memoryview) -> None:
    if crc32(stored) != piece.crc32:
        raise other_crc(path, piece, key)


def other_crc(path: Path, piece: Piece, key: str) -> Damaged:
    return Damaged(
        f"{path} is damaged: {key}, {piece.stored} bytes from byte {piece.offset} on, has another CRC "
        "than when it was committed"
    )
