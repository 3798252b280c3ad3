"""Host memory through which tensors are written to the disk.

A background save copies all tensors into memory that is shared with the writer process (``snapshot``), after which
training continues; the memory is kept for later saves. A save that blocks training uses the memory as a ring buffer
(``stream``): a thread writes to the disk while more data is copied into the buffer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, STEP_BYTES, ShardFile, crc32, up_to_block
from hpcaccel.core.free_memory import available_bytes

__all__ = ["SnapshotMemory", "can_share", "no_room", "raw_bytes", "stream"]

RING_BYTES = 32 << 20
"""Maximum size of a ring buffer that is allocated for one file. A larger buffer would allow longer writes,
but allocating it takes more time than longer writes save."""
LARGEST_PART = 0.9
"""Fraction of the free memory that snapshots may use."""


class SnapshotMemory:
    """Memory for a snapshot or a ring buffer. If ``can_share()`` is true, another process can map the memory, and the
    constructor allocates all pages, so that it fails at once if memory is short.

    Args:
        size: minimum size in bytes.
        path: a file in shared memory, which is created and then outlives this process; None: the memory has no name.

    Raises:
        OSError: the memory cannot be allocated.
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self.size = max(up_to_block(size), BLOCK_BYTES)
        self.descriptor = -1
        if path is not None or can_share():
            if path is None:
                self.descriptor = os.memfd_create("hpcaccel", os.MFD_CLOEXEC)
            else:
                self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(self.descriptor, 0, self.size)
                self._map = mmap.mmap(self.descriptor, self.size)
            except BaseException:
                os.close(self.descriptor)
                raise
        else:
            self._map = mmap.mmap(-1, self.size)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = False

    def __del__(self) -> None:
        if getattr(self, "_pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)

    def copy(self, data: memoryview, at: int) -> None:
        """Copy bytes to offset ``at``, with the GIL released."""
        if len(data):
            ctypes.memmove(self._address + at, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))

    def clear(self, start: int, stop: int) -> None:
        """Fill the bytes from ``start`` to ``stop`` with zeros."""
        if stop > start:
            ctypes.memset(self._address + start, 0, stop - start)

    def snapshot(self, tensors: Iterable[torch.Tensor], lengths: Iterable[int]) -> None:
        """Copy tensors one after the other, each padded with zeros to its length in bytes. Once this returns, the
        caller may change the tensors."""
        at = 0
        on_gpu = False
        for tensor, length in zip(tensors, lengths, strict=True):
            size = tensor.numel() * tensor.element_size()
            if tensor.is_cuda:
                on_gpu = True
                self._from_gpu(tensor, at, size)
            else:
                self.copy(raw_bytes(tensor), at)
            self.clear(at + size, at + length)
            at += length
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def _from_gpu(self, tensor: torch.Tensor, at: int, size: int) -> None:
        """Copy a GPU tensor to offset ``at``. The copy is queued on the current CUDA stream, and may still be running
        when this returns. The memory is pinned first if possible."""
        if not self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._pinned = int(runtime.cudaHostRegister(self._address, self.size, 0)) == 0
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self._bytes[at : at + size].copy_(plain.reshape(-1).view(torch.uint8), non_blocking=True)


def stream(memory: SnapshotMemory, path: Path, pieces: Iterable[tuple[memoryview, int]]) -> list[int]:
    """Write a file through ``memory``, and return once it is on the disk.

    Args:
        pieces: the data of each piece, and its length in bytes with padding.

    Returns:
        The CRC32 of each padded piece.

    Raises:
        OSError: the file cannot be written.
    """
    ring = _Ring(memory, ShardFile(path))
    try:
        crcs = [ring.put(data, length) for data, length in pieces]
    except BaseException:
        ring.abandon()
        raise
    ring.finish()
    return crcs


class _Ring:
    """A ring buffer: ``put`` fills it, and a thread writes its content to the disk."""

    def __init__(self, memory: SnapshotMemory, file: ShardFile) -> None:
        self._memory = memory
        self._file = file
        self._put = self._written = 0
        """Number of bytes put into the buffer so far, and number of bytes written to the file."""
        self._over = False
        self._problem: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._drain, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def put(self, data: memoryview, length: int) -> int:
        """Append ``data``, padded with zeros to ``length``. Returns the CRC32 of data and padding."""
        crc, done = 0, 0
        while done < length:
            start = self._put % self._memory.size
            step = min(STEP_BYTES, length - done, self._memory.size - start)
            self._wait_for_room(step)
            of_data = max(0, min(step, len(data) - done))
            self._memory.copy(data[done : done + of_data], start)
            self._memory.clear(start + of_data, start + step)
            crc = crc32(self._memory.view[start : start + step], crc)
            done += step
            with self._changed:
                self._put += step
                self._changed.notify()
        return crc

    def finish(self) -> None:
        self._end()
        if self._problem is None:
            try:
                self._file.finish(self._put)
            except BaseException:
                self._file.close()
                raise
            return
        self._file.close()
        raise self._problem

    def abandon(self) -> None:
        self._problem = self._problem or InterruptedError()
        self._end()
        self._file.close()

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _wait_for_room(self, step: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._put + step - self._written <= self._memory.size)
        if self._problem is not None:
            raise self._problem

    def _drain(self) -> None:
        try:
            while (part := self._next_part()) is not None:
                start, stop = part
                self._file.write(self._memory.view[start:stop], self._written)
                with self._changed:
                    self._written += stop - start
                    self._changed.notify()
        except BaseException as error:
            with self._changed:
                self._problem = error
                self._changed.notify()

    def _next_part(self) -> tuple[int, int] | None:
        """Wait for bytes to write, and return where in the buffer they start and stop: whole blocks or, after the last
        ``put``, the remainder. None if all bytes are written or an error has occurred."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._whole_blocks())
            start = self._written % self._memory.size
            ready = self._whole_blocks()
            if self._over:
                ready = up_to_block(self._put - self._written)
            if self._problem is not None or ready <= 0:
                return None
            return start, min(start + ready, self._memory.size)

    def _whole_blocks(self) -> int:
        return (self._put - self._written) // BLOCK_BYTES * BLOCK_BYTES


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: its own memory if it is contiguous on the CPU, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer since PEP 688


def can_share() -> bool:
    """Whether this system can share memory with another process through a file descriptor."""
    return hasattr(os, "memfd_create")


def no_room(size: int, *, of: int) -> str | None:
    """Why ``of`` processes on this machine cannot each allocate ``size`` bytes; None if they can, or if unknown."""
    if not can_share():
        return "this system has no memfd_create"
    free = available_bytes()
    if free is None or size * of <= LARGEST_PART * free:
        return None
    return (
        f"a snapshot of {size / 1e9:.2f} GB per rank (ranks on this node: {of}) does not fit in {LARGEST_PART:.0%} of "
        f"the {free / 1e9:.2f} GB of free memory"
    )
