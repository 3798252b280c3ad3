"""Reading a checkpoint's files: in large pieces, by several threads, every byte checked."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import ReadItem

from hpcaccel.checkpoint.manifest import Piece
from hpcaccel.errors import Damaged

__all__ = ["Batch", "StoredFile", "batches", "check", "other_crc"]

BATCH_BYTES = 1 << 20
"""Small chunks are read together, in one read of this size at most; larger ones by themselves."""


class StoredFile:
    """A file of a checkpoint, read from anywhere in it by several threads.

    Raises:
        Damaged: it is missing, too short, or the disk cannot read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None

    def read(self, offset: int, length: int, key: str) -> bytearray:
        data = bytearray(length)
        self.read_into(memoryview(data), offset, key)
        return data

    def read_into(self, view: memoryview, offset: int, key: str, piece: Piece | None = None) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise Damaged(f"{self.path} cannot be read at byte {offset}: {error.strerror}") from None
                raise
            if not count:
                end = offset + len(view) if piece is None else piece.offset + piece.stored
                raise Damaged(f"{self.path} ends before byte {end}, inside {key}")
            done += count


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
        os.posix_fadvise(self.file.descriptor, begin, self.end - begin, os.POSIX_FADV_WILLNEED)


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
    if zlib.crc32(stored) != piece.crc32:
        raise other_crc(path, piece, key)


def other_crc(path: Path, piece: Piece, key: str) -> Damaged:
    return Damaged(
        f"{path} is damaged: {key}, {piece.stored} bytes from byte {piece.offset} on, has another CRC "
        "than when it was committed"
    )
