"""The parts of a snapshot in shared memory: one file and one record for each rank. Does not import torch.

``<folder>/step_00000120.2.7/`` is snapshot number 7 of attempt 2, taken after step 120. ``rank_00003.bin`` has the same
content as in a checkpoint of this step. ``rank_00003.json`` is written when the file is complete: size, CRCs and
chunks of the file, and on rank 0 also the manifest's facts. The record contains its own CRC. So a part counts if, and
only if, its record is intact and its file has the recorded size; the CRCs of its bytes are verified as they are read.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint.shard_files import copy_bytes, rank_file
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import Damaged

__all__ = [
    "Holdings",
    "MappedFile",
    "RankedSnapshot",
    "SnapshotKey",
    "SnapshotRecord",
    "complete",
    "facts_of",
    "holdings",
    "publish",
    "ranks_in",
    "read_record",
    "record_path",
    "remove_except",
    "required_facts",
    "withdraw",
]

_NAME = re.compile(r"step_(\d{8,})\.(\d+)\.(\d+)")
_RECORD = re.compile(r"rank_(\d{5,})\.json")


class SnapshotKey(NamedTuple):
    """Identifies a snapshot of a run. The larger of two keys is the newer snapshot."""

    attempt: int
    number: int
    step: int

    @property
    def name(self) -> str:
        return f"{checkpoint_files.checkpoint_name(self.step)}.{self.attempt}.{self.number}"

    @classmethod
    def of(cls, name: str) -> SnapshotKey | None:
        """The key of the folder ``name``; None for any other name."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[2]), int(match[3]), int(match[1]))


@dataclass(frozen=True)
class SnapshotRecord:
    """The record of a part.

    Args:
        facts: see ``commit.write_manifest``; None except on rank 0.
    """

    rank: int
    world_size: int
    written: WrittenFile
    facts: dict[str, Any] | None = None

    def to_bytes(self) -> bytes:
        return manifest.seal({**vars(self), "written": vars(self.written)})

    @classmethod
    def from_bytes(cls, text: bytes, where: Path) -> SnapshotRecord:
        """Raises: Damaged: the record differs from the written one."""
        try:
            value = json.loads(text)
            if manifest.seal(value) == text:
                del value["crc32"]
                return cls(**{**value, "written": WrittenFile(**value["written"])})
        except (ValueError, TypeError, KeyError):
            pass
        raise Damaged(f"{where} is damaged: its CRC does not match its content")


class RankedSnapshot(NamedTuple):
    """A snapshot, and the number of ranks that took it, which is its number of parts."""

    key: SnapshotKey
    world_size: int


Holdings = dict[RankedSnapshot, dict[int, int]]
"""The parts that a node holds of snapshots, which may not be complete: for each rank, the size of the file in bytes."""


class MappedFile:
    """The file of a part, read like a ``StoredFile`` of a checkpoint, but without copies: it lies in memory.

    Raises:
        Damaged: the file is missing or empty. ``parts`` also raises this error if the file is too short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None
        try:
            # Private and writable, because ctypes reads from writable buffers only. Nothing is written.
            self._view = memoryview(
                mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            )
        except ValueError:
            os.close(self.descriptor)
            raise Damaged(f"{path} is empty") from None

    def prefetch(self, offset: int, length: int) -> None:
        pass

    def read(self, offset: int, length: int, key: str) -> bytearray:
        """Read ``length`` bytes from ``offset``. ``key`` is the name of the tensor, for error messages."""
        return bytearray(b"".join(self.parts(offset, length, key)))

    def parts(self, offset: int, length: int, key: str) -> Iterator[memoryview]:
        """Like ``read``, but yields the bytes without copying them."""
        if offset + length > len(self._view):
            raise Damaged(f"{self.path} ends before byte {offset + length}, inside {key}")
        yield self._view[offset : offset + length]

    def read_blocks(self, memory: memoryview, offset: int, key: str) -> None:
        """Copy bytes from ``offset`` on to ``memory``."""
        for part in self.parts(offset, len(memory), key):
            copy_bytes(memory, part)


def publish(folder: Path, key: SnapshotKey, record: SnapshotRecord, file: Path) -> None:
    """Make ``file`` a part of a snapshot: move it to its place, then write the record."""
    place = folder / key.name
    place.mkdir(mode=0o700, exist_ok=True)
    os.rename(file, place / rank_file(record.rank))
    atomic_write(record_path(place, record.rank), record.to_bytes(), sync=False)


def withdraw(folder: Path, key: SnapshotKey, rank: int, to: Path) -> None:
    """Undo ``publish``: remove the record, then move the file to ``to``, where it may be overwritten."""
    place = folder / key.name
    record_path(place, rank).unlink(missing_ok=True)
    os.rename(place / rank_file(rank), to)
    with contextlib.suppress(OSError):  # it still has the parts of other ranks
        place.rmdir()


def read_record(folder: Path, key: SnapshotKey, rank: int) -> SnapshotRecord:
    """The record of a part.

    Raises:
        Damaged: the record is missing or damaged.
    """
    path = record_path(folder / key.name, rank)
    return SnapshotRecord.from_bytes(manifest.read_file(path), path)


def holdings(folder: Path) -> Holdings:
    """The parts in a node's folder that have an intact record and a file of the recorded size."""
    found: defaultdict[RankedSnapshot, dict[int, int]] = defaultdict(dict)
    for place in sorted(folder.iterdir()):
        key = SnapshotKey.of(place.name)
        if key is None:
            continue
        for path in sorted(place.iterdir()):
            match = _RECORD.fullmatch(path.name)
            if match is None:
                continue
            try:
                record = read_record(folder, key, int(match[1]))
                size = (place / rank_file(record.rank)).stat().st_size
            except (Damaged, FileNotFoundError):
                continue
            if record.rank == int(match[1]) and size >= record.written.bytes:
                found[RankedSnapshot(key, record.world_size)][record.rank] = record.written.bytes
    return dict(found)


def complete(found: Iterable[Holdings]) -> RankedSnapshot | None:
    """The newest snapshot of which every part is held by one of the nodes; None if there is none."""
    ranks: defaultdict[RankedSnapshot, set[int]] = defaultdict(set)
    for holdings in found:
        for snapshot, sizes in holdings.items():
            ranks[snapshot].update(sizes)
    return max((one for one, those in ranks.items() if those == set(range(one.world_size))), default=None)


def ranks_in(folder: Path, key: SnapshotKey) -> set[int]:
    """The ranks whose records are in a node's folder."""
    names = (_RECORD.fullmatch(path.name) for path in (folder / key.name).iterdir())
    return {int(name[1]) for name in names if name is not None}


def facts_of(records: Iterable[SnapshotRecord]) -> dict[str, Any]:
    """The facts for the manifest, from the records of all ranks.

    Raises:
        Damaged: rank 0's record has no facts.
    """
    return required_facts(next((record.facts for record in records if record.facts is not None), None))


def required_facts(facts: dict[str, Any] | None) -> dict[str, Any]:
    """Raises: Damaged: rank 0's record has no facts."""
    if facts is None:
        raise Damaged("rank 0's record has no facts")
    return dict(facts)


def remove_except(folder: Path, wanted: Callable[[Path], bool]) -> None:
    """Delete everything in a node's folder for which ``wanted`` is false."""
    for path in folder.iterdir():
        if wanted(path):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def record_path(place: Path, rank: int) -> Path:
    """The record of a part in the folder of its snapshot."""
    return (place / rank_file(rank)).with_suffix(".json")
