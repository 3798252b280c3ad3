"""Transfer of the parts of a snapshot in memory to the nodes that lack them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcaccel.checkpoint import snapshot_parts
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.shard_files import rank_file
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["FoundSnapshot", "PartHolders", "PartTransfer"]

CHUNK_BYTES = 1 << 28
"""Maximum size of one message between two ranks."""


@dataclass(frozen=True)
class PartHolders:
    """Which nodes hold the parts of a snapshot.

    Args:
        nodes: for each rank of this attempt, the name of its node.
        held: for each part, the names of the nodes that hold it.
        sizes: for each part, its size in bytes.
    """

    nodes: tuple[str, ...]
    held: tuple[frozenset[str], ...]
    sizes: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Number of ranks whose part is not on their own node; 0 if the snapshot is of another number of ranks, so
        that a rank has no part of its own."""
        if len(self.held) != len(self.nodes):
            return 0
        return sum(node not in held for node, held in zip(self.nodes, self.held, strict=True))

    def moves(self, missing: list[set[str]]) -> list[tuple[int, int, int, int]]:
        """The transfers that bring each missing part once to each node: part, its size, sending rank, receiving rank.

        Args:
            missing: for each rank, the files of the parts that it needs and its node lacks.

        Raises:
            CheckpointError: no node of this attempt holds a part.
        """
        parts = {rank_file(rank): rank for rank in range(len(self.held))}
        moves: dict[tuple[int, str], tuple[int, int, int, int]] = {}
        for rank, names in enumerate(missing):
            for name in sorted(names):
                part = parts[name]
                source = next((other for other, node in enumerate(self.nodes) if node in self.held[part]), None)
                if source is None:
                    raise CheckpointError(f"no node holds {name}")
                moves.setdefault((part, self.nodes[rank]), (part, self.sizes[part], source, rank))
        return list(moves.values())


@dataclass(frozen=True)
class FoundSnapshot:
    """A complete snapshot. It has one part for each rank that took it.

    Args:
        parts: number of parts.
        nodes: number of nodes of this attempt.
        moved: see ``PartHolders``.
        read_here: the parts whose records this rank reads for all ranks.
        holders: on rank 0 the nodes that hold the parts; None on other ranks.
    """

    key: SnapshotKey
    parts: int
    nodes: int
    moved: int
    read_here: tuple[int, ...]
    holders: PartHolders | None


class PartTransfer:
    """Brings parts of ``found`` to this node's folder. ``what`` is the beginning of error messages."""

    def __init__(self, ranks: CheckpointRanks, folder: Path, found: FoundSnapshot, what: str) -> None:
        self._ranks = ranks
        self._folder = folder
        self._found = found
        self._what = what

    def fetch(self, files: set[str]) -> None:
        """Receive those of ``files`` that this node lacks, with their records, from nodes that hold them.

        Raises:
            Damaged: on all ranks, if a node has no memory for them.
        """
        found, what = self._found, self._what
        if found.nodes == 1:
            return  # this node holds all parts
        place = self._folder / found.key.name
        place.mkdir(mode=0o700, exist_ok=True)
        names = {Path(file).name for file in files}
        missing = {name for name in names if not (place / name).exists()}

        def moves_of(all_missing: list[set[str]]) -> list[tuple[int, int, int, int]]:
            assert found.holders is not None  # this is rank 0
            return found.holders.moves(all_missing)

        moves = self._ranks.reduce(what, lambda: missing, moves_of)
        if not moves:
            return

        def allocate() -> None:
            for part, size, _, target in moves:
                if target == self._ranks.rank:
                    _allocate(_incoming(place, part), size)

        self._ranks.run(what, allocate)
        for part, size, source, target in moves:
            if self._ranks.rank not in (source, target):
                continue
            # The record first: a node that has the file has its record, too.
            self._transfer_record(snapshot_parts.record_path(place, part), source=source, target=target)
            path = place / rank_file(part)
            file = path if self._ranks.rank == source else _incoming(place, part)
            self._transfer(file, size, source=source, target=target)
            if self._ranks.rank == target:
                os.rename(file, path)
        self._ranks.run(what, lambda: None)

    def _transfer(self, file: Path, size: int, *, source: int, target: int) -> None:
        if size == 0:
            return
        with file.open("r+b") as opened:
            content = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
            for chunk in content.split(CHUNK_BYTES):  # type: ignore[no-untyped-call]
                self._ranks.exchange(chunk, source=source, target=target)

    def _transfer_record(self, path: Path, *, source: int, target: int) -> None:
        text = manifest.read_file(path) if self._ranks.rank == source else b""
        size = torch.tensor([len(text)])
        self._ranks.exchange(size, source=source, target=target)
        content = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8)
        self._ranks.exchange(content, source=source, target=target)
        if self._ranks.rank == target:
            atomic_write(path, content.numpy().tobytes(), sync=False)


def _incoming(place: Path, part: int) -> Path:
    """The file of a part while it is received."""
    return (place / rank_file(part)).with_suffix(".incoming")


def _allocate(file: Path, size: int) -> None:
    """Create ``file`` with ``size`` bytes.

    Raises:
        Damaged: the memory is too small, so that this snapshot cannot be loaded; a checkpoint may be.
    """
    try:
        with file.open("w+b") as opened:
            if size:
                os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        raise Damaged(f"cannot receive {size:,} bytes in {file}: {error.strerror or error}") from None
