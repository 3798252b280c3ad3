"""Memory between the tensors and the disk, made once and used for every save.

A snapshot for the background is one copy of everything into memory that the writer process shares: when the copy is
made the training may go on. A save that is waited for sends the same bytes through the same memory, or a smaller
piece of it that goes round, and the disk takes what has been copied while more is being copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from hpcaccel.checkpoint.crc import crc32
from hpcaccel.checkpoint.writer_files import BLOCK_BYTES, ShardFile, up_to_block

__all__ = ["Memory", "available_bytes", "can_share", "copy_bytes", "no_room", "raw_bytes", "stream"]

RING_BYTES = 32 << 20
"""What a save that is waited for goes through, where there is no larger memory already: a larger ring makes longer
writes, but to have fresh memory takes longer than they save."""
STEP_BYTES = 1 << 20
"""So much is copied and then checked, so that the check finds it in the processor's cache."""
LARGEST_PART = 0.9
"""Of the memory that is free, so much may go to snapshots."""


class Memory:
    """Bytes that another process may share. Pages are there from the beginning, so that a full machine says so now.

    Args:
        size: at least so many.

    Raises:
        OSError: there is not so much.
    """

    def __init__(self, size: int) -> None:
        self.size = max(up_to_block(size), BLOCK_BYTES)
        self.descriptor = -1
        if can_share():
            self.descriptor = os.memfd_create("hpcaccel", os.MFD_CLOEXEC)
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
        """Copy bytes to here; other threads run meanwhile."""
        if len(data):
            ctypes.memmove(self._address + at, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))

    def clear(self, start: int, stop: int) -> None:
        if stop > start:
            ctypes.memset(self._address + start, 0, stop - start)

    def snapshot(self, tensors: Iterable[torch.Tensor], lengths: Iterable[int]) -> None:
        """Copy tensors one behind the other, each padded to its length. When this returns they may be changed."""
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
        """In the order of the stream that computes, so behind the last step; as fast as the bus where it is pinned."""
        if not self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._pinned = int(runtime.cudaHostRegister(self._address, self.size, 0)) == 0
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self._bytes[at : at + size].copy_(plain.reshape(-1).view(torch.uint8), non_blocking=True)


def stream(memory: Memory, path: Path, pieces: Iterable[tuple[memoryview, int]]) -> list[int]:
    """Write ``path`` through ``memory``, and return when it is on the disk: the CRC32 of each piece.

    Args:
        pieces: bytes and the length that they are padded to, one behind the other.

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
    """Bytes are put in at one end, and a thread writes to the disk whatever it finds at the other."""

    def __init__(self, memory: Memory, file: ShardFile) -> None:
        self._memory = memory
        self._file = file
        self._put = self._written = 0
        """So many bytes of the file have been put in, and are written."""
        self._over = False
        self._problem: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._drain, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def put(self, data: memoryview, length: int) -> int:
        """Put in ``data`` and zeros up to ``length``; their CRC32."""
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
        """Where the bytes lie that can be written in one go: whole blocks, and all the rest when no more will come."""
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
    """The bytes of a tensor in row-major order: its own memory where that is what it holds, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer since PEP 688


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as ``target`` holds; other threads run meanwhile."""
    if len(target):
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(target)),
            ctypes.addressof(ctypes.c_char.from_buffer(source)),
            len(target),
        )


def can_share() -> bool:
    """Whether this system can share memory with another process by a descriptor."""
    return hasattr(os, "memfd_create")


def no_room(size: int, *, of: int) -> str | None:
    """Why ``of`` processes of this machine should not each take ``size`` bytes; None when they may."""
    if not can_share():
        return "this system has no memfd_create"
    free = available_bytes()
    if free is None or size * of <= LARGEST_PART * free:
        return None
    return (
        f"a snapshot of {size / 1e9:.2f} GB on each of this node's {of} ranks does not fit in the {free / 1e9:.2f} GB "
        "of memory that are free here"
    )


def available_bytes() -> int | None:
    """Memory that can be had: of the machine, and of the control groups that this process is in. None: unknown."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left_in(Path("/sys/fs/cgroup"), path, limit="memory.max", used="memory.current")
        elif "memory" in controllers.split(","):
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            found += _left_in(Path("/sys/fs/cgroup/memory"), path, limit=limit, used=used)
    return min(found, default=None)


def _left_in(root: Path, path: str, *, limit: str, used: str) -> list[int]:
    """What each control group from ``path`` up to the root has left. Cached files give way, so they do not count."""
    found = []
    place = root / path.lstrip("/")
    for group in [place, *place.parents]:
        most, now = _lines(group / limit), _lines(group / used)
        if most and now and most[0].isdigit():
            statistics = dict(line.split() for line in _lines(group / "memory.stat"))
            found.append(int(most[0]) - int(now[0]) + int(statistics.get("inactive_file", 0)))
        if group == root:
            break
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
