"""Memory that is shared with the writer process, in huge pages."""

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from hpcaccel.checkpoint import huge_pages
from hpcaccel.checkpoint.huge_pages import PIECE_BYTES, SharedPages, begins_huge_page

LINUX = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture
def shared():
    """Memory of another process, and its mapping there; not a multiple of a huge page."""
    descriptor = os.memfd_create("test")
    size = 2 * PIECE_BYTES + 4096 * 3
    os.posix_fallocate(descriptor, 0, size)
    yield descriptor, mmap.mmap(descriptor, size), size
    os.close(descriptor)


def test_memory_keeps_its_bytes_and_is_still_shared(shared):
    descriptor, theirs, size = shared
    pattern = os.urandom(4096) * (size // 4096)
    theirs[:] = pattern
    pages = SharedPages(descriptor, size)
    over = threading.Event()

    def write():
        number = 0
        while not over.is_set():
            number = (number + 1) % 256
            theirs[-1] = theirs[size // 2] = number

    writer = threading.Thread(target=write)
    writer.start()
    pages.move_to_huge_pages(lambda: True)
    over.set()
    writer.join()
    assert pages.view[size // 2] == theirs[size // 2] == pages.view[-1]
    theirs[size // 2], theirs[-1] = pattern[size // 2], pattern[-1]
    assert pages.view == pattern
    pages.view[7:9] = b"ab"
    assert theirs[7:9] == b"ab"


@pytest.mark.skipif(LINUX < (6, 1) or not SETTING.exists() or "[deny]" in SETTING.read_text(), reason="needs Linux 6.1")
def test_memory_is_moved_piece_by_piece_as_long_as_nothing_else_is_to_be_done(shared):
    descriptor, _, size = shared
    pages = SharedPages(descriptor, size)
    answers = [True, False]
    pages.move_to_huge_pages(lambda: answers.pop(0))
    assert _in_huge_pages(pages) == PIECE_BYTES
    pages.move_to_huge_pages(lambda: True)
    assert _in_huge_pages(pages) == 2 * PIECE_BYTES


def test_memory_is_mapped_where_the_system_does_not_overcommit(shared, monkeypatch):
    def refuse(size):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    descriptor, theirs, size = shared
    theirs[-3:] = b"abc"
    monkeypatch.setattr(huge_pages, "_reserve", refuse)
    pages = SharedPages(descriptor, size)
    pages.move_to_huge_pages(lambda: True)
    assert pages.view[-3:] == b"abc"
    assert len(pages.view) == size


def test_a_descriptor_that_cannot_be_mapped_is_an_error(tmp_path):
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Permission denied"):
        SharedPages(file.fileno(), 4096)


def test_only_the_first_block_begins_a_huge_page():
    assert begins_huge_page(6 << 20)
    assert begins_huge_page((6 << 20) + 4095)
    assert not begins_huge_page((6 << 20) + 4096)


def _in_huge_pages(pages):
    """Bytes of the mapping that are mapped as huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages.view))
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(value, 16) for value in first.split("-"))
            inside = start <= address < end
        elif inside and first == "ShmemPmdMapped:":
            found = 1024 * int(line.split()[1])
    return found
