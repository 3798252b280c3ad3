"""Memory through which the ranks of a node share what they read, so that each byte is read once per node.

Ranks that need the same chunks form a group: all ranks of DDP, the replicas of a shard in hybrid sharding, or the ranks
among which a chunk is divided since there are more of them than at the save. Each reads every ``count``-th segment from
the disk, and copies the others from a ring of slots in shared memory. Nothing depends on the ring: a rank that waits
too long for a segment, or finds a wrong CRC, reads the segment itself.

A rank may belong to several groups: tensors that are distributed in the same way, such as all that are not distributed
at all, are compared with those of the other ranks as one *kind*.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from hpcaccel.checkpoint.manifest_writer import Piece
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, up_to_block
from hpcaccel.core.free_memory import available_bytes

__all__ = [
    "LEAST_PART_BYTES",
    "WHOLE",
    "Offer",
    "Share",
    "SharedRing",
    "groups",
    "offer",
    "open_ring",
    "open_rings",
]

log = logging.getLogger(__name__)
T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "hpcaccel-load-"
ABANDONED_SECONDS = 600.0
"""A ring that nobody has written to for this long: its ranks were killed before all of them had opened it."""
RING_BYTES = 32 << 20
LEAST_BYTES = 16 << 20
"""Ranks that have fewer bytes in common do not share them: setting up a ring takes time too."""
LEAST_PART_BYTES = 64 << 10
"""Smaller parts of distributed tensors are not shared."""
MOST_RANKS = 64
MOST_RINGS = 3
"""Maximum number of kinds that a rank shares: each has a ring of its own."""
SLOTS = 4
"""Slots of each rank of the group, so that a reader need not wait for the slowest rank after each segment."""
PATIENCE_SECONDS = 10.0
"""A rank that has waited this long reads alone from then on."""
PAUSES_SECONDS = (0.0001, 0.002)
JOINED, CLOSED = 1, 2
WHOLE = "whole"
"""The kind of the tensors that are not distributed."""

Offer = tuple[str, dict[str, str]]
"""The node of a rank, and by kind a digest of the chunks that the rank can share."""


class Share(NamedTuple):
    """A rank's place in a group: the name of the ring, its position, and the number of ranks."""

    name: str
    position: int
    ranks: int


def offer(pieces: Iterable[tuple[str, Piece]]) -> Offer | None:
    """What this rank can share; None if that is too little, or if shared memory is missing or short.

    Args:
        pieces: the chunks that it reads and that other ranks may read too, each with its kind.
    """
    places: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for kind, piece in pieces:
        places[kind].add((piece.file, piece.offset, piece.stored))
    sizes = {kind: sum(stored for _, _, stored in found) for kind, found in places.items()}
    largest = sorted((kind for kind, size in sizes.items() if size >= LEAST_BYTES), key=lambda kind: -sizes[kind])
    kinds = largest[:MOST_RINGS]
    free = available_bytes() if kinds else 0
    if not kinds or (free is not None and free < 4 * RING_BYTES * len(kinds)):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        device = SHARED_MEMORY.stat().st_dev  # containers on one machine may have their own
    except OSError:
        return None
    node = _digest((socket.gethostname(), boot, device, os.getuid()))
    return node, {kind: _digest(sorted(places[kind])) for kind in kinds}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def groups(offers: Sequence[Offer | None]) -> list[dict[str, Share]]:
    """For each rank, by kind, its place in a group of ranks with equal chunks of this kind."""
    members: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, made in enumerate(offers):
        if made is not None:
            node, digests = made
            for kind, digest in digests.items():
                members[node, kind, digest].append(rank)
    shares: list[dict[str, Share]] = [{} for _ in offers]
    for (_, kind, _), ranks in members.items():
        if 1 < len(ranks) <= MOST_RANKS:
            name = PREFIX + secrets.token_hex(16)
            for position, rank in enumerate(ranks):
                shares[rank][kind] = Share(name, position, len(ranks))
    return shares


def open_rings(shares: Mapping[str, Share]) -> dict[str, SharedRing]:
    """The rings of a rank's groups, in an order that is the same on all ranks. Removes abandoned ones first."""
    if shares:
        _remove_abandoned()
    rings = {kind: open_ring(shares[kind]) for kind in sorted(shares)}
    return {kind: ring for kind, ring in rings.items() if ring is not None}


def _remove_abandoned() -> None:
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another rank has removed it
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > ABANDONED_SECONDS:
                path.unlink()


def open_ring(share: Share) -> SharedRing | None:
    """The ring of a group; None if there is no memory for it."""
    try:
        return SharedRing(share)
    except OSError as error:
        log.debug("this rank reads its checkpoint without the other ranks of its node: %s", error)
        (SHARED_MEMORY / share.name).unlink(missing_ok=True)
        return None


class SharedRing:
    """Slots in shared memory. Segment ``n`` is read by the rank at position ``n`` modulo the number of ranks.

    The file begins with counters: each rank's state; for each slot, the number of its segment + 1 and its CRC; for each
    slot and rank, the number + 1 of the segment that the rank has copied last. They are read and written by system
    calls, which also order the accesses to the slots.

    Raises:
        OSError: the memory cannot be allocated.
    """

    def __init__(self, share: Share) -> None:
        self.position, self.count = share.position, share.ranks
        slots = self.count * SLOTS
        self._filled_at = 8 * self.count
        self._taken_at = self._filled_at + 16 * slots
        self._slots_at = up_to_block(self._taken_at + 8 * slots * self.count)
        self.segment_bytes = RING_BYTES // slots // BLOCK_BYTES * BLOCK_BYTES
        self._over = False
        path = SHARED_MEMORY / share.name
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size = self._slots_at + slots * self.segment_bytes
            os.posix_fallocate(self._fd, 0, size)
            self._view = memoryview(mmap.mmap(self._fd, size))
        except BaseException:
            os.close(self._fd)
            raise
        self._write(8 * self.position, JOINED)
        if all(self._read(0, self.count)):
            path.unlink(missing_ok=True)  # nobody opens it any more

    def reads(self, number: int) -> bool:
        """Whether this rank reads the segment from the disk."""
        return number % self.count == self.position

    def free_slot(self, number: int) -> memoryview | None:
        """Wait until the other ranks have copied the last segment in the slot of segment ``number``. None if this rank
        reads alone from now on."""
        before = number - self.count * SLOTS

        def ready() -> bool | None:
            taken = self._read(self._taken_at + 8 * self._slot(number) * self.count, self.count)
            states = self._read(0, self.count)
            waits = (
                last <= before and state != CLOSED and position != self.position
                for position, (last, state) in enumerate(zip(taken, states, strict=True))
            )
            return None if any(waits) else True

        return self._memory(number) if before < 0 or self._wait(ready) else None

    def publish(self, number: int, crc: int) -> None:
        """Make the content of a segment's slot available to the other ranks."""
        self._write(self._filled_at + 16 * self._slot(number), number + 1, crc)

    def find(self, number: int) -> tuple[memoryview, int] | None:
        """Wait for a segment. Returns its slot and its CRC; None if the rank that reads it has given up."""
        owner = 8 * (number % self.count)

        def ready() -> tuple[int, int] | None:
            (state,) = self._read(owner, 1)
            current, crc = self._read(self._filled_at + 16 * self._slot(number), 2)
            if current == number + 1:
                return current, crc
            return (0, 0) if state == CLOSED else None

        current, crc = self._wait(ready) or (0, 0)
        return (self._memory(number), crc) if current else None

    def release(self, number: int) -> None:
        """Record that this rank has copied a segment."""
        self._write(self._taken_at + 8 * (self._slot(number) * self.count + self.position), number + 1)

    def leave(self) -> None:
        """Neither wait for other ranks any more, nor let them wait for this one."""
        self._over = True
        self._write(8 * self.position, CLOSED)

    def close(self) -> None:
        self.leave()
        os.close(self._fd)

    def _slot(self, number: int) -> int:
        return number % self.count * SLOTS + number // self.count % SLOTS

    def _memory(self, number: int) -> memoryview:
        at = self._slots_at + self._slot(number) * self.segment_bytes
        return self._view[at : at + self.segment_bytes]

    def _wait(self, ready: Callable[[], T | None]) -> T | None:
        pause, longest = PAUSES_SECONDS
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._over:
            if (value := ready()) is not None:
                return value
            if time.monotonic() > deadline:
                log.debug("this rank no longer waits for the other ranks of its node, and reads its checkpoint alone")
                self.leave()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return None

    def _read(self, at: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}Q", os.pread(self._fd, 8 * count, at))

    def _write(self, at: int, *values: int) -> None:
        os.pwrite(self._fd, struct.pack(f"={len(values)}Q", *values), at)
