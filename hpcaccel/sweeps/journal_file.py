"""A sweep's journal: JSON lines that many processes on many nodes append to, any of which may be killed at any moment.

A line counts when it ends with its own newline and every byte of it is there; nothing else is ever seen. What was
appended with ``sync`` survives a power cut. Readers take no lock, and write nothing.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import FILE_MODE, fsync_directory
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.journal_lock import PATIENCE_SECONDS, Claim, owner_of
from hpcaccel.sweeps.journal_segments import WRITABLE, Segments

__all__ = ["JournalFile"]

TORN = b"~\n"
"""Closes a line that its writer could not finish. It spoils the line even where only its newline was missing: that
writer has gone, or has been told that its line is not there."""

ADVICE = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "Your quota is used up: free some space",
    errno.EFBIG: "The limit for the size of a file is reached: see ulimit -f",
    errno.EROFS: "It is mounted read-only: have it mounted for writing, or copy the sweep to where you can write",
    errno.EACCES: "You may not write there: see ls -ld",
    errno.EPERM: "You may not write there: see ls -ld",
    errno.ENOENT: "The sweep's directory is gone",
}


class JournalFile:
    """The journal at ``path``, which need not be there yet. Building one touches no file.

    Args:
        patience_seconds: for how long a process that has the lock, and is not known to be dead, is waited for.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.path = Path(path).absolute()
        self.patience_seconds = patience_seconds
        self._segments = Segments(self.path)
        self._claim = Claim(self.path.parent)
        self._thread = threading.Lock()

    def __repr__(self) -> str:
        return f"JournalFile({str(self.path)!r})"

    def append(self, lines: Iterable[Mapping[str, Any]], *, sync: bool = False) -> None:
        """Append objects, in their order and with nothing between them.

        Raises:
            RunDirectoryError: the disk is full, or may not be written. What stood there stands; none of these lines
                will count unless all its bytes had got there.
        """
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            with self._thread:
                self._append(data, sync)
        except OSError as error:
            raise self._refused(error) from error

    def sync(self) -> None:
        """Let everything that was appended so far survive a power cut.

        Raises:
            RunDirectoryError: as for ``append``.
        """
        try:
            fd = os.open(self._segments.path(self._segments.newest), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return  # nothing was appended
        except OSError as error:
            raise self._refused(error) from error

    def lines(self, offset: int = 0) -> Iterator[tuple[bytes, int]]:
        """Whole lines from ``offset`` on, torn ones too, each with the offset behind it."""
        for behind, data in self.pieces(offset):
            begin = behind - len(data)
            for line in data[:-1].split(b"\n"):
                begin += len(line) + 1
                yield line, begin

    def pieces(self, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """The same without taking the lines apart: many at a time, with the offset behind them."""
        try:
            yield from self._segments.pieces(offset)
        except OSError as error:
            raise RunDirectoryError(f"cannot read the sweep's journal {self.path}: {error.strerror}") from error

    def _append(self, data: bytes, sync: bool) -> None:
        while True:
            number = self._segments.newest
            if not self._claim.hold(self._segments.lock(number), self.patience_seconds):
                self._pass_over(number)
                continue
            try:
                end = self._write(number, data, sync)
                if end is not None and not self._segments.is_closed(number):
                    return
            finally:
                self._segments.lock(number).unlink(missing_ok=True)
            # Somebody has gone on without us, or is about to.
            self._segments.refresh()
            if self._segments.newest == number:
                self._segments.close(number, "whoever closed it went no further")
                self._segments.refresh()
            if end is not None and self._segments.counts(number, end):
                return

    def _pass_over(self, number: int) -> None:
        owner = owner_of(self._segments.lock(number)) or {}
        self._segments.close(number, f"process {owner.get('pid')} on {owner.get('host')} has left its lock behind")
        self._segments.refresh()

    def _write(self, number: int, data: bytes, sync: bool) -> int | None:
        """Append to a segment that we hold the lock of; the length that it has then, None where it is closed."""
        path = self._segments.path(number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
        except PermissionError:
            if self._segments.is_closed(number):
                return None
            raise
        try:
            found = os.fstat(fd)
            if not found.st_mode & WRITABLE:
                return None
            size = found.st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = TORN + data
            _write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)  # on NFS this is what sends it to the server, and may be what fails
        if sync and not size:
            fsync_directory(path.parent)
        return size + len(data)

    def _refused(self, error: OSError) -> RunDirectoryError:
        advice = ADVICE.get(error.errno or 0, "See the file system's state")
        return RunDirectoryError(
            f"cannot write to the sweep's journal {self.path}: {error.strerror}. {advice}, "
            "then go on with: hpcaccel sweep resume. Everything that was written before is there"
        )


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
