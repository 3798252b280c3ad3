"""Bytes that a save need not write, because a file of the checkpoint before contains them. Does not import torch.

A rank's writer remembers where its last save put each chunk. If chunks have not changed since then (frozen parameters,
for example), the file that contains them is hard-linked into the new checkpoint's directory as ``rank_00003.base.bin``,
and the rank's own file contains the other chunks only. So every checkpoint directory is complete by itself, and any of
them may be deleted, moved or copied.

A rank links one file at most, and only if at least ``LEAST_PART`` of its bytes are unchanged: the rest is dead weight.
If the file cannot be linked (the file system has no hard links, or the older checkpoint was renamed or deleted), all
chunks are written.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, up_to_block
from hpcaccel.checkpoint.written_file import WrittenFile

__all__ = ["Base", "KnownFile", "LastSave", "Layout", "base_file"]

LEAST_PART = 0.5
"""Fraction of a file's bytes that must be unchanged."""
LEAST_BYTES = 64 << 10
"""Smaller chunks are always written: many short gaps would cost more than they save."""


def base_file(file: str) -> str:
    """Path of the linked file beside a rank's ``file``, within the checkpoint."""
    return str(Path(file).with_suffix(f".base{Path(file).suffix}"))


class StoredAt(NamedTuple):
    """Where a chunk is stored: file, offset and CRC32."""

    file: str
    offset: int
    crc32: int


@dataclass(frozen=True)
class KnownFile:
    """A file of the last save: size, CRC32, and what tells it from another file that has taken its name since."""

    bytes: int
    crc32: int
    inode: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, crc32: int) -> KnownFile:
        found = os.stat(path)
        return cls(found.st_size, crc32, found.st_ino, found.st_mtime_ns)


@dataclass(frozen=True)
class Base:
    """A linked file: its name, what is known of it, and the place of each chunk that it contains, by number."""

    file: str
    known: KnownFile
    chunks: dict[int, StoredAt]

    def to_json(self) -> dict[str, Any]:
        """See ``WrittenFile.base``."""
        known = self.known
        return {"file": self.file, "bytes": known.bytes, "crc32": known.crc32, "pieces": sorted(self.chunks)}


class LastSave:
    """Where a rank's last save put its chunks.

    Args:
        step: the step of that save.
        directory: its checkpoint, once it is committed.
    """

    def __init__(self, step: int, directory: Path, written: WrittenFile, files: dict[str, KnownFile]) -> None:
        self.step = step
        self._directory = directory
        self._files = files
        starts = list(accumulate(written.lengths, initial=0))
        self._places = {
            (start, length): StoredAt(*place, crc)
            for start, length, place, crc in zip(
                starts, written.lengths, written.places(), written.pieces, strict=False
            )
        }
        """By offset in the snapshot and length."""

    def link(self, unchanged: Collection[int], lengths: Sequence[int], directory: Path, target: str) -> Base | None:
        """Link the file that contains most of the unchanged chunks, and is worth it.

        Args:
            unchanged: numbers of chunks whose bytes have not changed since this save.
            lengths: the length of every chunk in the snapshot.
            directory: that of the new checkpoint.
            target: path of the link in it.

        Returns:
            The linked file; None if none contains enough, or if it cannot be linked.
        """
        starts = list(accumulate(lengths, initial=0))
        by_file: defaultdict[str, dict[int, StoredAt]] = defaultdict(dict)
        for number in unchanged:
            place = self._places.get((starts[number], lengths[number]))
            if place is not None and lengths[number] >= LEAST_BYTES:
                by_file[place.file][number] = place
        sizes = {name: sum(lengths[number] for number in chunks) for name, chunks in by_file.items()}
        worth_it = [name for name, size in sizes.items() if size >= LEAST_PART * self._files[name].bytes]
        name = max(worth_it, key=sizes.__getitem__, default=None)
        if name is None or not _link(self._directory / name, directory / target, self._files[name]):
            return None
        return Base(target, self._files[name], by_file[name])


def _link(source: Path, target: Path, known: KnownFile) -> bool:
    """Whether ``source`` is still the known file and could be linked to ``target``."""
    try:
        os.link(source, target)
    except OSError:
        return False
    if KnownFile.of(target, known.crc32) == known:
        return True
    target.unlink()
    return False


@dataclass
class Extent:
    """Whole blocks of a snapshot, the offset in the file that they are written to, and the chunks in them."""

    start: int
    stop: int
    offset: int
    chunks: list[int] = field(default_factory=list)


class Part(NamedTuple):
    """A part of a file: the chunk that it contains, and where the snapshot has it. None: the rest of a block."""

    chunk: int | None
    start: int
    length: int


class Layout:
    """Which parts of a snapshot are written to a rank's file, and where its chunks are then.

    Direct I/O writes whole blocks. The blocks at both ends of an extent may contain bytes of chunks that are elsewhere;
    the index does not refer to these.

    Args:
        lengths: the length of every chunk in the snapshot.
        base: the file that contains some of the chunks; None if there is none.
    """

    def __init__(self, lengths: Sequence[int], base: Base | None) -> None:
        self._lengths = lengths
        self._starts = list(accumulate(lengths, initial=0))
        self._in_base = {} if base is None else base.chunks
        self.extents: list[Extent] = []
        self.size = 0
        """Size of the file in bytes. The last block may extend past it."""
        self.offsets = [self._place(number) for number in range(len(lengths))]
        """Where each chunk lies in its file."""

    def _place(self, number: int) -> int:
        start, length = self._starts[number], self._lengths[number]
        if number in self._in_base:
            return self._in_base[number].offset
        if not length:
            return 0
        begin = start // BLOCK_BYTES * BLOCK_BYTES
        if not self.extents or begin > self.extents[-1].stop:
            self.extents.append(Extent(begin, begin, up_to_block(self.size)))
        extent = self.extents[-1]
        extent.stop = up_to_block(start + length)
        extent.chunks.append(number)
        self.size = extent.offset + start + length - extent.start
        return extent.offset + start - extent.start

    def parts(self) -> Iterator[Part]:
        """All bytes of the file, from its beginning to its end."""
        for extent in self.extents:
            at = extent.start
            for number in extent.chunks:
                start, length = self._starts[number], self._lengths[number]
                if start > at:
                    yield Part(None, at, start - at)
                yield Part(number, start, length)
                at = start + length
            if extent is not self.extents[-1] and extent.stop > at:
                yield Part(None, at, extent.stop - at)
