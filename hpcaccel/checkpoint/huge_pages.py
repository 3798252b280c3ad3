"""Memory in huge pages: direct I/O from and to pages of 4 KiB takes up to twice as long, and more CPU time. Does not
import torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable

from hpcaccel.checkpoint.shard_files import BLOCK_BYTES

__all__ = ["SharedPages", "begins_huge_page", "huge_pages"]

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 16 * HUGE_PAGE_BYTES
"""Memory that is moved at a time."""
MAP_FIXED, MADV_COLLAPSE = 0x10, 25
"""Of Linux. ``MADV_COLLAPSE`` exists since Linux 6.1, also where ``shmem_enabled`` is ``never`` (madvise(2))."""
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p


def huge_pages(size: int, *, remainder: int = 0) -> memoryview:
    """New memory, in huge pages if possible.

    Args:
        remainder: of its address, divided by the size of a block.
    """
    mapping, begin = _reserve(remainder + size)
    with contextlib.suppress(AttributeError, OSError):  # Python or the kernel was built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[begin + remainder : begin + remainder + size]


def begins_huge_page(address: int) -> bool:
    """Whether ``address`` is in the first block of what can be a huge page, as that of memory from ``huge_pages`` is.
    Other large memory begins there only by chance."""
    return address % HUGE_PAGE_BYTES < BLOCK_BYTES


class SharedPages:
    """Memory that another process has allocated, mapped in such a way that it can be moved into huge pages.

    Args:
        descriptor: of the memory (memfd, or a file in shared memory).
        size: in bytes, a multiple of a block.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._moved = 0
        try:
            self._map, self._begin = _reserve(size)
        except OSError:  # without overcommit, the system counts it as new memory until it is replaced
            self._map, self._begin = mmap.mmap(descriptor, size), 0
            self._moved = size
        else:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self._begin
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if _mmap(address, size, access, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) != address:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.view = memoryview(self._map)[self._begin : self._begin + size]

    def move_to_huge_pages(self, idle: Callable[[], bool]) -> None:
        """Move the memory into huge pages, as long as ``idle()`` is true; the next call continues. What cannot be moved
        (memory that is pinned or in a transfer, an older kernel) stays in small pages; it is not tried again. Other
        processes may use the memory meanwhile."""
        size = len(self.view)
        while self._moved < size and idle():
            length = min(PIECE_BYTES, size - self._moved)
            with contextlib.suppress(OSError):
                self._map.madvise(MADV_COLLAPSE, self._begin + self._moved, length)
            self._moved += length


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """New memory that contains ``size`` bytes from the beginning of a huge page on, and their offset."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mapping, -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
