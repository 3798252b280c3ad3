"""The files of a sweep's journal, read as one stream of bytes.

There is one file, ``journal.jsonl``, until a process dies or is suspended while it holds the lock. A waiting process
then closes that file and continues in ``journal.1.jsonl``, whose first line states how many bytes of the closed file
count. The lock is therefore never broken, and a holder that resumes can determine whether its line counts:

1. Close: remove the write permission from the file, *then* measure its length.
2. Create the next segment exclusively, with that length in its first line. Several processes may try; one succeeds.
3. A writer whose line is on the disk opens the file once more. If the file is still writable, the line was there before
   the file was measured. Otherwise the length in the next segment decides whether the line counts; if the line does not
   count, the writer appends it to the next segment.

The decision depends only on file attributes and on names that are created exclusively, and NFS clients request both
from the server. (A client may cache for half a minute that a name is missing; nothing relies on that.) Nothing is
replaced or truncated, so a process that is suspended between two of these steps cannot destroy data.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hpcaccel.core.durable_files import FILE_MODE, fsync_directory
from hpcaccel.errors import HpcaccelError

__all__ = ["Segments"]

PIECE_BYTES = 1 << 22
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Segments:
    """The segments found so far. Offsets are byte positions in the stream of all segments."""

    def __init__(self, path: Path) -> None:
        self.first = path
        self._starts = [0]
        self._furthest = 0
        """Offset up to which the newest known segment has been read."""
        self._looked = False

    @property
    def newest(self) -> int:
        """Number of the newest known segment."""
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
        """Look for newer segments.

        Raises:
            HpcaccelError: this process has read bytes beyond the length at which a segment was closed.
        """
        # A copy of the folder may have lost the permissions that mark closed segments, so check at least once.
        while not self._looked or self.is_closed(self._newest):
            length = self._length_of(self._newest)
            if length is None:
                break
            start = self._starts[-1] + length
            if self._furthest > start:
                raise HpcaccelError(
                    f"{self.path(self._newest)} was closed at byte {length}, but this process has read beyond that: "
                    "the process's copy of the study is wrong. Restart the process; the journal itself is intact"
                )
            self._starts.append(start)
        self._looked = True

    def is_closed(self, number: int) -> bool:
        """Whether this segment has been closed, so that lines appended from now on may not count."""
        found = self._attributes(number)
        return found is not None and not found.st_mode & WRITABLE

    def _attributes(self, number: int) -> os.stat_result | None:
        """Attributes of a segment's file; None if it does not exist. The file is opened because an NFS client then
        requests the attributes from the server."""
        try:
            fd = os.open(self.path(number), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def counts(self, number: int, end: int) -> bool:
        """Whether a line that ends at byte ``end`` of a closed segment is part of the journal."""
        return self._starts[number] + end <= self._starts[number + 1]

    def close(self, number: int, why: str) -> None:
        """Close this segment and create the next one. Any number of processes may do so at once."""
        path = self.path(number)
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, FILE_MODE)
        try:
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~WRITABLE)
        finally:
            os.close(fd)
        fd = os.open(path, os.O_RDONLY)  # opened again so that NFS returns the server's length
        try:
            found = os.fstat(fd)
            os.fsync(fd)  # after a power cut the stream must have no holes
        finally:
            os.close(fd)
        if found.st_mode & WRITABLE:
            raise HpcaccelError(
                f"the file system of {path} does not store permissions, which a sweep needs: put the sweep's directory "
                "on another file system"
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
            pass  # another process was first; its length is used
        finally:
            temporary.unlink(missing_ok=True)

    def _length_of(self, number: int) -> int | None:
        """How many bytes of a segment count; None if no segment follows it."""
        try:
            with self.path(number + 1).open("rb") as file:
                header = json.loads(file.readline())
        except FileNotFoundError:
            return None
        return int(header["after_bytes"])

    def pieces(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """All whole lines from ``offset`` on, in chunks. Yields the offset after each chunk, and the chunk.

        A tail without a newline is left for the next read; in a closed segment it never becomes a line.
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
        """Whether nothing was appended after ``offset``, judging by the file's size. This check is cheap, because
        Optuna polls often and mostly finds nothing new."""
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
                    self.refresh()  # closed in the meantime: some of these bytes may not count
                    if number < self.newest:
                        continue
                if whole:
                    offset += whole
                    if number == self.newest:
                        self._furthest = offset
                    yield offset, data[:whole]
                if len(data) < wanted:
                    return
                wanted = PIECE_BYTES if whole else 2 * wanted  # a line longer than a chunk
        finally:
            os.close(fd)
