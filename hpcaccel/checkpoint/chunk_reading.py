"""Reading of chunks from a checkpoint's files into tensors, by several threads.

A large chunk is divided into segments, so that several threads read it; small chunks that are close together in a file
are one segment. The thread that reads a segment computes its CRC while the bytes are in the CPU cache; the CRC of a
chunk is combined from those of its segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hpcaccel.checkpoint.chunk_targets import ChunkTarget, Copied
from hpcaccel.checkpoint.node_sharing import SharedRing
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, copy_bytes, crc32
from hpcaccel.checkpoint.stored_file import StoredFile

__all__ = ["Segment", "read_chunks", "segments"]

READERS = 6
"""Number of reader threads: some compute CRCs and copy while others wait for the disk."""
SHARING_READERS = 3
"""The same for ranks that share what they read: together they keep the disk busy."""
MOST_COPIERS = 2
"""Maximum number of threads that copy what other ranks have read."""
SEGMENT_BYTES = 8 << 20
DIRECT_BYTES = 4 << 20
"""Maximum size of one read into a tensor's memory."""
BATCH_BYTES = 1 << 20
"""Maximum size of a batch of small chunks that are read together."""


@dataclass(frozen=True)
class Segment:
    """Bytes of a file that one thread reads: a part of a chunk, or several small chunks."""

    chunks: Sequence[ChunkTarget]
    begin: int
    end: int

    @property
    def file(self) -> str:
        return self.chunks[0].piece.file

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def read(self, file: StoredFile, slot: memoryview | None = None) -> list[Copied]:
        """Read the segment into the tensors of its chunks.

        Args:
            slot: memory that the bytes of the segment are copied to as well.

        Raises:
            Damaged: the file is too short.
        """
        chunk, offset = self.chunks[0], self.chunks[0].piece.offset
        if len(self.chunks) > 1:
            data = file.read(self.begin, self.bytes, chunk.key)
            if slot is not None:
                slot[: len(data)] = data
            return self.copy(memoryview(data))
        memory = chunk.memory(self.begin - offset, self.end - offset) if slot is None else None
        if memory is None:
            crc = self._through_buffer(file, self.begin, self.end, 0, slot)
        else:
            blocks = self.begin + -self.begin % BLOCK_BYTES
            crc = self._through_buffer(file, self.begin, blocks, 0)
            crc = _read_blocks(file, memory, blocks, chunk.key, crc)
            crc = self._through_buffer(file, blocks + len(memory), self.end, crc)
        return [Copied(chunk, self.begin - offset, crc, self.bytes)]

    def copy(self, data: memoryview) -> list[Copied]:
        """Copy ``data``, the bytes of the segment, to the tensors of its chunks."""
        copied = []
        for chunk in self.chunks:
            start, stop = max(self.begin, chunk.piece.offset), min(self.end, chunk.piece.offset + chunk.piece.stored)
            at = start - chunk.piece.offset
            crc = chunk.put(at, data[start - self.begin : stop - self.begin])
            copied.append(Copied(chunk, at, crc, stop - start))
        return copied

    def _through_buffer(self, file: StoredFile, begin: int, end: int, crc: int, slot: memoryview | None = None) -> int:
        """Read the bytes of the only chunk from offset ``begin`` to ``end`` of the file. Returns their CRC, continued
        from ``crc``."""
        (chunk,) = self.chunks
        for part in file.parts(begin, end - begin, chunk.key):
            crc = chunk.put(begin - chunk.piece.offset, part, crc)
            if slot is not None:
                copy_bytes(slot[begin - self.begin :][: len(part)], part)
            begin += len(part)
        return crc


def segments(chunks: Iterable[ChunkTarget], largest: int | None = None) -> Iterator[Segment]:
    """Divide ``chunks``, which are sorted, into segments of at most ``largest`` bytes (default: ``SEGMENT_BYTES``)."""
    largest = largest or SEGMENT_BYTES
    batch: list[ChunkTarget] = []
    most = min(BATCH_BYTES, largest)

    def small(chunks: list[ChunkTarget]) -> Iterator[Segment]:
        if chunks:
            last = chunks[-1].piece
            yield Segment(chunks, chunks[0].piece.offset, last.offset + last.stored)

    for chunk in chunks:
        piece = chunk.piece
        end = piece.offset + piece.stored
        first = batch[0].piece if batch else piece
        if piece.stored > most or first.file != piece.file or end - first.offset > most:
            yield from small(batch)
            batch = []
        if piece.stored <= most:
            batch.append(chunk)
            continue
        begin = piece.offset
        while begin < end:
            stop = min(end, (begin // largest + 1) * largest)
            yield Segment([chunk], begin, stop)
            begin = stop
    yield from small(batch)


def _read_blocks(file: StoredFile, memory: memoryview, offset: int, key: str, crc: int) -> int:
    """Read whole blocks into a tensor's memory. Returns their CRC, continued from ``crc``."""
    for start in range(0, len(memory), DIRECT_BYTES):
        part = memory[start : start + DIRECT_BYTES]
        file.read_blocks(part, offset + start, key)
        crc = crc32(part, crc)
    return crc


def read_chunks(
    chunks: Sequence[ChunkTarget],
    open_file: Callable[[str], StoredFile],
    shared: Sequence[tuple[SharedRing, Sequence[ChunkTarget]]] = (),
) -> None:
    """Read all chunks, file by file and front to back, with several threads.

    Args:
        chunks: those that this rank reads alone, by file and offset.
        shared: those that it reads together with other ranks of this node: for each ring its chunks, by file and
            offset. All ranks that use two of the rings list them in the same order.

    Raises:
        Damaged: of several problems, the first one in the order of the shared chunks, then of the others.
    """
    jobs = [
        _Job(segment, open_file(segment.file), number, ring)
        for ring, common in shared
        for number, segment in enumerate(segments(common, ring.segment_bytes))
    ]
    jobs += [_Job(segment, open_file(segment.file)) for segment in segments(chunks)]
    reader_threads = SHARING_READERS if shared else READERS
    copier_threads = min(MOST_COPIERS, max((ring.count for ring, _ in shared), default=2) - 1)
    from_disk = [job for job in jobs if job.from_disk]
    for job, later in zip(from_disk, [*from_disk[reader_threads:], *[None] * reader_threads], strict=False):
        job.later = later
    for job in from_disk[:reader_threads]:
        job.prefetch()
    with ThreadPoolExecutor(reader_threads) as readers, ThreadPoolExecutor(copier_threads) as copiers:
        running = [(readers if job.from_disk else copiers).submit(job.run) for job in jobs]
        try:
            for future in running:
                future.result()
        except BaseException:
            for ring, _ in shared:
                ring.leave()
            readers.shutdown(wait=False, cancel_futures=True)
            copiers.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass
class _Job:
    """One segment to read, and its number if the ranks of the node share it."""

    segment: Segment
    file: StoredFile
    number: int = 0
    ring: SharedRing | None = None
    later: _Job | None = None
    """The job to prefetch while this one runs."""

    @property
    def from_disk(self) -> bool:
        return self.ring is None or self.ring.reads(self.number)

    def prefetch(self) -> None:
        self.file.prefetch(self.segment.begin, self.segment.bytes)

    def run(self) -> None:
        if self.later is not None:
            self.later.prefetch()
        with torch.no_grad():
            for copied in self._read():
                copied.chunk.check(copied, self.file.path)

    def _read(self) -> list[Copied]:
        if self.ring is None:
            return self.segment.read(self.file)
        if self.from_disk:
            slot = self.ring.free_slot(self.number)
            copied = self.segment.read(self.file, slot)
            if slot is not None:
                self.ring.publish(self.number, _crc_of(copied))
            return copied
        if (found := self.ring.find(self.number)) is not None:
            slot, crc = found
            copied = self.segment.copy(slot[: self.segment.bytes])
            self.ring.release(self.number)
            if _crc_of(copied) == crc:
                return copied
        return self.segment.read(self.file)


def _crc_of(copied: Sequence[Copied]) -> int:
    return crc32(b"".join(part.crc.to_bytes(4, "little") for part in copied))
