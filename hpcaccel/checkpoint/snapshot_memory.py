"""Host memory through which tensors are written to the disk.

A background save copies all tensors into memory that is shared with the writer process (``snapshot``), after which
training continues. The memory is kept: the next snapshot compares each tensor with the bytes that it still holds. A
save that blocks training uses the memory as a ring buffer (``stream``): a thread writes while more data is copied.
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
GPU_PROBE_BYTES, GPU_STEP_BYTES = 4096, 32 << 20
"""Bytes of a GPU tensor that are compared first, and at a time after that."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
        self._held: set[tuple[int, int]] = set()
        """Offset and length of each tensor of the last snapshot that the memory holds."""
        self._changing: set[tuple[int, int]] = set()
        """Those of GPU tensors that have changed between two snapshots. They are not compared again."""

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

    def snapshot(self, tensors: Iterable[torch.Tensor], lengths: Iterable[int], *, compare: bool = False) -> list[int]:
        """Copy tensors one after the other, each padded with zeros to its length in bytes. Once this returns, the
        caller may change the tensors.

        Args:
            compare: whether to compare them with the last snapshot. A comparison ends at the first difference.

        Returns:
            The numbers of the tensors whose bytes the last snapshot held at the same place; empty without ``compare``.
        """
        last, self._held = self._held if compare else set(), set()
        unchanged: list[int] = []
        at, on_gpu = 0, False
        for number, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
            size = tensor.numel() * tensor.element_size()
            is_same = (at, length) in last and self.view[at + size : at + length] == bytes(length - size)
            if tensor.is_cuda:
                on_gpu = True
                if not (is_same := is_same and self._equals_gpu(tensor, at, length)):
                    self._from_gpu(tensor, at, size)
            elif is_same:
                is_same = self._update(raw_bytes(tensor), at)
            else:
                self.copy(raw_bytes(tensor), at)
            self.clear(at + size, at + length)
            if is_same:
                unchanged.append(number)
            self._held.add((at, length))
            at += length
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return unchanged

    def forget(self) -> None:
        """Record that the memory no longer holds the last snapshot."""
        self._held = set()

    def _update(self, data: memoryview, at: int) -> bool:
        """Copy the part of ``data`` that begins with the first difference. Returns whether there is no difference."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0
        for start in range(0, len(data), STEP_BYTES):
            if _memcmp(self._address + at + start, source + start, min(STEP_BYTES, len(data) - start)):
                self.copy(data[start:], at + start)
                return False
        return True

    def _equals_gpu(self, tensor: torch.Tensor, at: int, length: int) -> bool:
        """Whether the memory at ``at`` holds the bytes of a GPU tensor. They are compared on the GPU. A tensor that has
        changed once counts as changed from then on: each comparison waits for the GPU."""
        if (at, length) in self._changing:
            return False
        new, old = _flat_bytes(tensor), self._bytes[at:]
        start, step = 0, GPU_PROBE_BYTES
        try:
            while start < new.numel():
                part = new[start : start + step]
                if not torch.equal(part, old[start : start + len(part)].to(new.device)):
                    self._changing.add((at, length))
                    return False
                start, step = start + step, GPU_STEP_BYTES
        except torch.OutOfMemoryError:  # no memory for the copy of one step
            return False
        return True

    def _from_gpu(self, tensor: torch.Tensor, at: int, size: int) -> None:
        """Copy a GPU tensor to offset ``at``. The copy is queued on the current CUDA stream, and may still be running
        when this returns. The memory is pinned first if possible."""
        if not self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._pinned = int(runtime.cudaHostRegister(self._address, self.size, 0)) == 0
        self._bytes[at : at + size].copy_(_flat_bytes(tensor), non_blocking=True)


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
        memory.forget()
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
    return memoryview(_flat_bytes(tensor.detach().cpu()).numpy())  # type: ignore[arg-type]  # a buffer since PEP 688


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, on its device: its own memory if it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


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
