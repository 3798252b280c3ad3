"""Writing of a rank's file, ``rank_00003.bin``, with direct I/O and CRC32; see ``stored_file`` for reading. Does not
import torch.

Direct I/O bypasses the page cache: durable writes are fastest this way, and the training data stays cached. Addresses,
offsets and lengths must be multiples of a block, so the last write may extend past the data, and the file is truncated.
On file systems without direct I/O the page cache is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

from hpcaccel.core.durable_files import FILE_MODE

try:
    from isal.isal_zlib import crc32  # several times faster than zlib
except ImportError:  # no wheel for this processor, or a container with torch only
    from zlib import crc32

__all__ = [
    "BLOCK_BYTES",
    "STEP_BYTES",
    "ShardFile",
    "copy_bytes",
    "crc32",
    "disable_direct",
    "open_direct",
    "rank_file",
    "up_to_block",
    "why_not_written",
]

BLOCK_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths that are multiples of this."""
LARGEST_WRITE_BYTES = 1 << 30
"""Maximum size of one write. Long writes are faster, because the disk is idle between two writes."""
STEP_BYTES = 1 << 20
"""Data is copied in steps of this size. The CRC of a step is computed while the step is in the CPU cache."""
DIRECT: int = getattr(os, "O_DIRECT", 0)


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


# -- writing


class ShardFile:
    """A new file. Its contents are durable once ``finish`` has returned.

    Raises:
        OSError: the file exists, or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._fd, self._direct = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset``. Its memory address, its length and ``offset`` must be multiples of a block."""
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done : done + LARGEST_WRITE_BYTES], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                disable_direct(self._fd)

    def finish(self, size: int) -> None:
        """Truncate the file to ``size`` bytes, and return once they are on the disk."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def up_to_block(size: int) -> int:
    """``size`` in bytes, rounded up to a multiple of ``BLOCK_BYTES``."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def why_not_written(error: OSError, folder: Path, size: int) -> str:
    """Message: why a file of ``size`` bytes could not be written. Includes ``size`` if disk or quota is full."""
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f"; it needs {size:,} bytes"
    if error.errno == errno.ENOSPC:  # the remaining quota cannot be determined
        with contextlib.suppress(OSError):
            text += f", {shutil.disk_usage(folder).free:,} are free"
    return text


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file, with direct I/O if the file system supports it. Returns the descriptor and whether I/O is direct."""
    if DIRECT:
        try:
            return os.open(path, flags | DIRECT, FILE_MODE), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if flags & os.O_EXCL:
            path.unlink(missing_ok=True)  # Linux creates the file before it rejects direct I/O
    return os.open(path, flags, FILE_MODE), False


def disable_direct(descriptor: int) -> None:
    """Switch to the page cache, after the file system has rejected a direct transfer."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``len(target)`` bytes with the GIL released."""
    if len(target):
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(target)),
            ctypes.addressof(ctypes.c_char.from_buffer(source)),
            len(target),
        )
