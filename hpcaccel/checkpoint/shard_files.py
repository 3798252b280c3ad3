"""Writing and reading of a rank's file, ``rank_00003.bin``, with direct I/O and CRC32. Does not import torch.

Direct I/O bypasses the page cache: durable writes are fastest this way, and the training data stays cached. Addresses,
offsets and lengths must be multiples of a block, so the last write may extend past the data, and the file is truncated.
On file systems without direct I/O the page cache is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccel.core.durable_files import FILE_MODE
from hpcaccel.errors import Damaged

try:
    from isal.isal_zlib import crc32  # several times faster than zlib
except ImportError:  # no wheel for this processor, or a container with torch only
    from zlib import crc32

if TYPE_CHECKING:
    # The writer process imports this module and has no torch.
    import torch
    from torch.distributed.checkpoint.planner import ReadItem

    from hpcaccel.checkpoint.manifest_writer import Piece

__all__ = [
    "BLOCK_BYTES",
    "STEP_BYTES",
    "ReadBatch",
    "ShardFile",
    "StoredFile",
    "batches",
    "check_crc",
    "copy_bytes",
    "crc32",
    "rank_file",
    "read_into",
    "up_to_block",
    "why_not_written",
    "wrong_crc",
]

BLOCK_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths that are multiples of this."""
LARGEST_WRITE_BYTES = 1 << 30
"""Maximum size of one write. Long writes are faster, because the disk is idle between two writes."""
BOUNCE_BYTES = 8 << 20
"""Maximum size of a thread's read buffer."""
BATCH_BYTES = 1 << 20
"""Maximum size of a batch of small chunks that are read together. Larger chunks are read alone."""
HUGE_PAGE_BYTES = 2 << 20
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
        self._fd, self._direct = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

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
                _disable_direct(self._fd)

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


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
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


def _disable_direct(descriptor: int) -> None:
    """Switch to the page cache, after the file system has rejected a direct transfer."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)


# -- reading


class StoredFile:
    """A file of a checkpoint, read at any offset by several threads.

    Reads use direct I/O, because every byte is read only once: filling the cache costs more than copying to the tensor.

    Raises:
        Damaged: the file is missing. The methods also raise this error if the file is too short, and after I/O errors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor, self._direct = _open_direct(path, os.O_RDONLY)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None

    def prefetch(self, offset: int, length: int) -> None:
        """Let the page cache read ahead. No effect with direct I/O: its reads are long enough without read-ahead."""
        if not self._direct:
            os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, length: int, key: str) -> bytearray:
        """Read ``length`` bytes from ``offset``. ``key`` is the name of the tensor, for error messages."""
        data = bytearray()
        for part in self.parts(offset, length, key):
            data += part
        return data

    def parts(self, offset: int, length: int, key: str) -> Iterator[memoryview]:
        """Like ``read``, but yields the bytes in parts. Each part is valid until the next one is read."""
        end = offset + length
        memory = _bounce_buffer(min(up_to_block(length + BLOCK_BYTES), BOUNCE_BYTES))
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
        _disable_direct(self.descriptor)
        return os.preadv(self.descriptor, [memory], offset)


_thread = threading.local()


def _bounce_buffer(size: int) -> memoryview:
    """This thread's read buffer, reused because allocating pages is slow. Huge pages are used if possible: with 4 KiB
    pages the kernel splits a read into requests of 1 MiB, which halves the speed of direct reads from some disks."""
    if len(getattr(_thread, "memory", b"")) < size:
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # Python or the kernel was built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
        _thread.memory = memoryview(mapping)[begin : begin + size]
    found: memoryview = _thread.memory
    return found[:size]


@dataclass
class ReadBatch:
    """Chunks that one read covers: a single chunk, or small chunks that are close together in one file."""

    pieces: list[Piece]
    items: list[ReadItem]
    targets: list[torch.Tensor]
    file: StoredFile | None = None
    later: ReadBatch | None = None
    """The batch to prefetch while this one is read."""

    @property
    def end(self) -> int:
        return max(piece.offset + piece.stored for piece in self.pieces)

    def prefetch(self) -> None:
        assert self.file is not None
        begin = self.pieces[0].offset
        self.file.prefetch(begin, self.end - begin)


def batches(work: list[tuple[Piece, ReadItem]], targets: list[torch.Tensor]) -> Iterator[ReadBatch]:
    """Group ``work``, which is sorted by file and offset, into batches.

    Args:
        targets: the tensor that each item of ``work`` is read into.
    """
    batch: ReadBatch | None = None
    for (piece, item), target in zip(work, targets, strict=True):
        if batch is not None:
            same = batch.pieces[0].file == piece.file
            if same and max(batch.end, piece.offset + piece.stored) - batch.pieces[0].offset <= BATCH_BYTES:
                batch.pieces.append(piece)
                batch.items.append(item)
                batch.targets.append(target)
                continue
            yield batch
        batch = ReadBatch([piece], [item], [target])
    if batch is not None:
        yield batch


def read_into(target: memoryview, parts: Iterator[memoryview]) -> int:
    """Copy ``parts``, one after the other, into ``target``.

    Returns:
        The CRC32 of all parts.
    """
    crc, done = 0, 0
    for part in parts:
        for start in range(0, len(part), STEP_BYTES):
            step = part[start : start + STEP_BYTES]
            copy_bytes(target[done : done + len(step)], step)
            crc = crc32(step, crc)
            done += len(step)
    return crc


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``len(target)`` bytes with the GIL released."""
    if len(target):
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(target)),
            ctypes.addressof(ctypes.c_char.from_buffer(source)),
            len(target),
        )


def check_crc(path: Path, piece: Piece, key: str, stored: memoryview) -> None:
    """Verify the CRC of a chunk.

    Raises:
        Damaged: ``stored`` differs from the committed bytes.
    """
    if crc32(stored) != piece.crc32:
        raise wrong_crc(path, piece, key)


def wrong_crc(path: Path, piece: Piece, key: str) -> Damaged:
    return Damaged(
        f"{path} is damaged: the CRC of {key} ({piece.stored} bytes from byte {piece.offset}) differs from the "
        "committed CRC"
    )
