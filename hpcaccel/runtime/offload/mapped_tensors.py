"""Tensors in files, mapped into memory without a copy.

A tensor whose bytes do not begin at a multiple of 64 in its file is copied: the CPU's matrix products round differently
at other addresses, and results would not be equal to those of a model in memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcaccel.errors import CheckpointError, RuntimeMisuse

__all__ = ["MappedTensor", "OffloadError", "as_dtype", "read_tensor", "warm"]

ALIGNMENT = 64
"""Alignment in bytes of tensors in torch's own CPU memory."""
CHUNK_BYTES = 32 << 20
"""Mapped at once where the mapping is not kept: as much of the file counts as memory of this process."""


class OffloadError(RuntimeMisuse, ValueError, RuntimeError):
    """A device map, a tensor or an offload folder cannot be used. Accelerate raises ValueError or RuntimeError."""


class MappedTensor(NamedTuple):
    """Location of a tensor's bytes."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype named ``float16`` or ``torch.float16``; a dtype or None is returned unchanged.

    Raises:
        OffloadError: there is no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise OffloadError(f"{dtype!r} is not a torch dtype: use a name such as 'float16'")
    return found


def read_tensor(stored: MappedTensor, *, copy: bool = False) -> torch.Tensor:
    """The tensor, as a private mapping of the file: changing it does not change the file, and its memory is released
    with its last reference.

    Args:
        copy: whether to read it into torch's own memory instead, so that the file may be changed later.

    Raises:
        CheckpointError: the file does not exist, cannot be read, or is too short.
    """
    if not stored.bytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    with _opened(stored) as file:
        raw = None if copy or stored.offset % ALIGNMENT else _mapped(file.fileno(), stored.offset, stored.bytes)
        if raw is None:
            raw = torch.empty(stored.bytes, dtype=torch.uint8)
            for begin in range(0, stored.bytes, CHUNK_BYTES):
                _fill(raw[begin : begin + CHUNK_BYTES], file, stored.offset + begin)
    return raw.view(stored.dtype).reshape(stored.shape)


def warm(stored: MappedTensor) -> None:
    """Load the bytes of a tensor into the page cache. One byte of each page is read, without holding the GIL.

    Raises:
        CheckpointError: as in ``read_tensor``.
    """
    with _opened(stored) as file:
        for begin in range(0, stored.bytes, CHUNK_BYTES):
            raw = _mapped(file.fileno(), stored.offset + begin, min(CHUNK_BYTES, stored.bytes - begin))
            if raw is not None:
                raw[:: mmap.PAGESIZE].sum()


@contextmanager
def _opened(stored: MappedTensor) -> Iterator[Any]:
    try:
        with stored.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < stored.offset + stored.bytes:
                end = stored.offset + stored.bytes
                raise CheckpointError(f"{stored.path} has {size} bytes, but one of its tensors ends at byte {end}")
            yield file
    except OSError as error:
        raise CheckpointError(f"cannot read weights from {stored.path}: {error.strerror or error}") from error


def _mapped(descriptor: int, offset: int, length: int) -> torch.Tensor | None:
    """Bytes of a file as a private mapping; None if the file system has no mappings."""
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        pages = mmap.mmap(descriptor, offset - begin + length, access=mmap.ACCESS_COPY, offset=begin)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return None
    return torch.frombuffer(pages, dtype=torch.uint8, count=length, offset=offset - begin)


def _fill(room: torch.Tensor, file: Any, offset: int) -> None:
    """Copy bytes of a file. Through a mapping, torch copies with all its threads."""
    raw = _mapped(file.fileno(), offset, room.numel())
    if raw is not None:
        room.copy_(raw)
        return
    left = memoryview(room.numpy())  # type: ignore[arg-type]
    file.seek(offset)
    while left:
        count = file.readinto(left)
        if not count:
            raise CheckpointError(f"{file.name} was shortened while it was read")
        left = left[count:]
