"""The files of a sweep's journal, as one stream of bytes.

There is one, ``journal.jsonl``, until a process dies, or sleeps, with the lock in its hand. Then somebody who waits
closes that file and goes on in ``journal.1.jsonl``, whose first line says how many bytes of the closed one count. So
the lock need never be broken, and a holder that wakes up finds out that its line may not count:

1. close: take the write permission from the file, *then* measure it;
2. make the next segment, exclusively, with the length in its first line. Several may try; one length wins;
3. a writer that has brought its line to the disk opens the file once more. Has it write permission, then its line was
   there before the file was measured. Otherwise the length in the next segment says whether it counts; if not, the
   writer appends it again there.

What decides is in the file's own attributes and in exclusive names, both of which NFS asks its server for; that a name
is missing may be remembered wrongly for half a minute there, and is never relied upon. Nothing is ever replaced or
cut off, so that nobody who sleeps between two of these steps can destroy anything.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hpcaccel.core.run_dir import FILE_MODE, fsync_directory
from hpcaccel.errors import HpcaccelError

__all__ = ["Segments"]

PIECE_BYTES = 1 << 22
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Segments:
    """What is known of the segments so far. Offsets count from the beginning of the first one through all of them."""

    def __init__(self, path: Path) -> None:
        self.first = path
        self._starts = [0]
        self._furthest = 0
        """How far somebody has read in the newest segment that is known."""
        self._looked = False

    @property
    def newest(self) -> int:
        """The number of the newest segment, as far as is known."""
        if not self._looked:
            self.refresh()
        return self._newest

    @property
    def _newest(self) -> int:
        return len(self._starts) - 1

    def path(self, number: int) -> Path:
        return self.first.with_suffix(f".{number}{self.first.suffix}") if number else self.first

    def lock(self, number: int) -> Path:
        return self.first.with_name(f".{self.first.name}.{number}.lock")

    def refresh(self) -> None:
        """Find out which segment is the newest.

        Raises:
            HpcaccelError: what was read from a segment does not count after all.
        """
        # A copy of the folder may have lost the permissions that say which segments are closed: look once.
        while not self._looked or self.is_closed(self._newest):
            length = self._length_of(self._newest)
            if length is None:
                break
            start = self._starts[-1] + length
            if self._furthest > start:
                raise HpcaccelError(
                    f"{self.path(self._newest)} was closed at byte {length}, and this process has read on from there: "
                    "what it knows of the study is wrong. Start it again; the journal itself is in order"
                )
            self._starts.append(start)
        self._looked = True

    def is_closed(self, number: int) -> bool:
        """Whether nothing that is appended to this segment from now on counts."""
        found = self._attributes(number)
        return found is not None and not found.st_mode & WRITABLE

    def _attributes(self, number: int) -> os.stat_result | None:
        """Those of the server, on NFS: they are asked for when a file is opened."""
        try:
            fd = os.open(self.path(number), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def counts(self, number: int, end: int) -> bool:
        """Whether what ends at byte ``end`` of a closed segment is part of the journal."""
        return self._starts[number] + end <= self._starts[number + 1]

    def close(self, number: int, why: str) -> None:
        """Go on in a new segment, whatever happens to this one. Any number of processes may do so at once."""
        path = self.path(number)
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, FILE_MODE)
        try:
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~WRITABLE)
        finally:
            os.close(fd)
        fd = os.open(path, os.O_RDONLY)  # anew: only so is its length on NFS the server's
        try:
            found = os.fstat(fd)
            os.fsync(fd)  # what a power cut leaves of the stream has no holes
        finally:
            os.close(fd)
        if found.st_mode & WRITABLE:
            raise HpcaccelError(
                f"the file system of {path} keeps no permissions, and a sweep needs them: choose another"
            )
        self._make_next(number, found.st_size, why)
        self.lock(number).unlink(missing_ok=True)

    def _make_next(self, number: int, length: int, why: str) -> None:
        header = {"hpcaccel": "segment", "after_bytes": length, "why": why, "time": time.time()}
        temporary = self.first.with_name(f".{self.first.name}.{os.getpid()}.{os.urandom(3).hex()}.tmp")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            with os.fdopen(fd, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, self.path(number + 1))
            fsync_directory(self.first.parent)
        except FileExistsError:
            pass  # somebody else was first, and it is their length that counts
        finally:
            temporary.unlink(missing_ok=True)

    def _length_of(self, number: int) -> int | None:
        """How many bytes of a segment count, None where none follows it."""
        try:
            with self.path(number + 1).open("rb") as file:
                header = json.loads(file.readline())
        except FileNotFoundError:
            return None
        return int(header["after_bytes"])

    def pieces(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """All whole lines from ``offset`` on: bytes that end with a newline, each piece with the offset behind it.

        A tail without a newline is left for the next reader; that of a closed segment will never be a line.
        """
        if self._nothing_since(offset):
            return
        self.refresh()
        number = max(index for index, start in enumerate(self._starts) if start <= offset)
        while True:
            yield from self._pieces_of(number, offset)
            if number == self.newest:
                return
            number += 1
            offset = self._starts[number]

    def _nothing_since(self, offset: int) -> bool:
        """Seen at one glance: whoever asks most often, Optuna, mostly finds nothing new."""
        if not self._looked:
            return False
        found = self._attributes(self._newest)
        return found is not None and bool(found.st_mode & WRITABLE) and found.st_size <= offset - self._starts[-1]

    def _pieces_of(self, number: int, offset: int) -> Iterator[tuple[int, bytes]]:
        start = self._starts[number]
        try:
            fd = os.open(self.path(number), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            wanted = PIECE_BYTES
            while True:
                end = self._starts[number + 1] if number < self.newest else None
                most = wanted if end is None else min(wanted, end - offset)
                data = os.pread(fd, most, offset - start)
                whole = data.rfind(b"\n") + 1
                if number == self.newest and whole and self.is_closed(number):
                    self.refresh()  # closed meanwhile: some of these bytes may have come too late
                    if number < self.newest:
                        continue
                if whole:
                    offset += whole
                    if number == self.newest:
                        self._furthest = offset
                    yield offset, data[:whole]
                if len(data) < wanted:
                    return
                wanted = PIECE_BYTES if whole else 2 * wanted  # a line longer than a piece
        finally:
            os.close(fd)
