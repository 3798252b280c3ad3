"""One rank's file on its way to the disk, without torch: direct I/O where the file system has it.

Direct I/O goes past the page cache: the disk takes the bytes from where they lie, which is the fastest way to have them
there for good, and the pages that the training reads its data from stay. It wants addresses, offsets and lengths in
multiples of a block, so the last write is longer than the file, which is then cut to its size. Writes are as long as
they can be: between two of them the disk waits for this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from hpcaccel.core.run_dir import FILE_MODE

__all__ = ["BLOCK_BYTES", "ShardFile", "give_up_direct", "open_direct", "rank_file", "up_to_block", "why_not_written"]

BLOCK_BYTES = 4096
LARGEST_WRITE_BYTES = 1 << 30
DIRECT: int = getattr(os, "O_DIRECT", 0)


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


def why_not_written(error: OSError, folder: Path, size: int) -> str:
    """What kept a file of ``size`` bytes in ``folder`` from being written; where the disk or the quota is full, with
    the bytes that it needs."""
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f"; it needs {size:,} bytes"
    if error.errno == errno.ENOSPC:  # the file system does not tell what a quota has left
        with contextlib.suppress(OSError):
            text += f", {shutil.disk_usage(folder).free:,} are free"
    return text


def up_to_block(size: int) -> int:
    """The smallest multiple of a block that is not below ``size``."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open with direct I/O, or without it where the file system has none: the descriptor, and whether it has."""
    if DIRECT:
        try:
            return os.open(path, flags | DIRECT, FILE_MODE), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if flags & os.O_EXCL:
            path.unlink(missing_ok=True)  # Linux has made the file before it finds that it has no direct I/O
    return os.open(path, flags, FILE_MODE), False


def give_up_direct(descriptor: int) -> None:
    """From here on through the page cache: the file system has refused a direct transfer."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)


class ShardFile:
    """A file that must not be there yet. Nothing is on the disk for certain before ``finish`` has returned."""

    def __init__(self, path: Path) -> None:
        self._fd, self._direct = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data``, whole blocks in aligned memory, at ``offset``, a multiple of a block."""
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done : done + LARGEST_WRITE_BYTES], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                give_up_direct(self._fd)

    def finish(self, size: int) -> None:
        """Cut the file to ``size`` bytes, and return when they are on the disk."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
