"""Reading of a rank's file, ``rank_00003.bin``, at any offset and by several threads. Does not import torch.

Reads use direct I/O, because every byte is read only once: filling the page cache costs more than copying to the
tensor. Each thread reads through a buffer in huge pages, unless the target is in huge pages itself and has the
alignment of the file: with pages of 4 KiB the kernel splits a read into requests of 1 MiB, and direct reads from some
disks take twice as long.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from hpcaccel.checkpoint.huge_pages import huge_pages
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, disable_direct, open_direct, up_to_block
from hpcaccel.errors import Damaged

__all__ = ["StoredFile"]

log = logging.getLogger(__name__)

BOUNCE_BYTES = 2 << 20
"""Maximum size of a thread's read buffer. What has been read is copied while it is in the CPU cache."""


class StoredFile:
    """A file of a checkpoint.

    Raises:
        Damaged: the file is missing. The methods also raise this error if the file is too short, and after I/O errors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor, self._direct = open_direct(path, os.O_RDONLY)
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

    def read_blocks(self, memory: memoryview, offset: int, key: str) -> None:
        """Fill ``memory`` without a buffer in between. Address, length and ``offset`` are multiples of a block."""
        done = 0
        while done < len(memory):
            count = self._pread(memory[done:], offset + done)
            if count <= 0:
                raise Damaged(f"{self.path} ends before byte {offset + len(memory)}, inside {key}")
            done += count

    def _pread(self, memory: memoryview, offset: int) -> int:
        direct = self._direct  # another thread may change it meanwhile
        try:
            return os.preadv(self.descriptor, [memory], offset)
        except OSError as error:
            if error.errno == errno.EIO:
                raise Damaged(f"{self.path} cannot be read at byte {offset}: {error.strerror}") from None
            if error.errno != errno.EINVAL or not direct:
                raise
        log.debug("%s is read through the page cache: its file system rejected a direct read", self.path)
        disable_direct(self.descriptor)
        self._direct = False
        return os.preadv(self.descriptor, [memory], offset)


_thread = threading.local()


def _bounce_buffer(size: int) -> memoryview:
    """This thread's read buffer, reused because allocating pages is slow."""
    if len(getattr(_thread, "memory", b"")) < size:
        _thread.memory = huge_pages(size)
    found: memoryview = _thread.memory
    return found[:size]
