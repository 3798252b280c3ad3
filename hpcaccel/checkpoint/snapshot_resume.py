"""Resume from a snapshot in the memory of the nodes: agree on the newest complete one, collect its parts, restore.

The snapshot may be of another number of ranks, as a checkpoint may: ``restore`` then reads each tensor from the parts
that contain it. So each node receives those parts that its ranks read and that it does not hold.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import LoadPlan

from hpcaccel.checkpoint import snapshot_parts
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.loading import LoadedCheckpoint, restore
from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.shard_files import rank_file
from hpcaccel.checkpoint.snapshot_parts import Holding, MappedFile, SnapshotKey, SnapshotRecord
from hpcaccel.checkpoint.stored_file import StoredFile
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState
from hpcaccel.checkpoint.written_file import index_of
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["FoundSnapshot", "SnapshotResume"]

CHUNK_BYTES = 1 << 28
"""Maximum size of one message between two ranks."""


@dataclass(frozen=True)
class FoundSnapshot:
    """A complete snapshot. It has one part for each rank that took it.

    Args:
        nodes: for each rank of this attempt, the name of its node.
        held: for each part, the names of the nodes that hold it.
        sizes: for each part, its size in bytes.
    """

    key: SnapshotKey
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


class SnapshotResume:
    """Finds and loads snapshots. All methods are collective.

    Args:
        folder: this node's folder of the run.
        is_local_main: whether this rank manages the node's folder.
    """

    def __init__(self, ranks: CheckpointRanks, folder: SnapshotFolder, *, is_local_main: bool) -> None:
        self._ranks = ranks
        self._folder = folder
        self._is_local_main = is_local_main

    def find(self, *, committed: dict[str, Any] | None) -> FoundSnapshot | None:
        """The newest snapshot of which all parts are held by the nodes of this attempt; None if there is none, or if
        the newest checkpoint is newer. Another number of ranks may have taken it.

        Args:
            committed: the manifest of the newest checkpoint, on rank 0; None if there is none.
        """

        def choose(reports: list[tuple[str, list[Holding]]]) -> FoundSnapshot | None:
            newest = snapshot_parts.complete(holding for _, holdings in reports for holding in holdings)
            if newest is None or _is_older(newest.key, committed):
                return None
            held: defaultdict[int, set[str]] = defaultdict(set)
            sizes: dict[int, int] = {}
            for node, holdings in reports:
                for holding in holdings:
                    if (holding.key, holding.world_size) == newest:
                        held[holding.rank].add(node)
                        sizes[holding.rank] = holding.bytes
            every = range(newest.world_size)
            return FoundSnapshot(
                newest.key,
                tuple(node for node, _ in reports),
                tuple(frozenset(held[rank]) for rank in every),
                tuple(sizes[rank] for rank in every),
            )

        def report() -> tuple[str, list[Holding]]:
            folder = self._folder.path
            return folder.name, snapshot_parts.holdings(folder) if self._is_local_main else []

        return self._ranks.reduce("the snapshots in memory cannot be read", report, choose)

    def load(self, found: FoundSnapshot, state: TrainingState) -> LoadedCheckpoint:
        """Restore ``state`` in place, and check the CRCs of what is read.

        Raises:
            Damaged: on all ranks, if a part is damaged, or a node has no memory for the parts that it lacks. ``state``
            may be partly restored.
            CheckpointError: on all ranks, if the snapshot is of another model.
        """
        place = self._folder.path / found.key.name
        what = f"the snapshot of step {found.key.step} in memory cannot be loaded"
        content, index_text = self._ranks.reduce(what, lambda: self._own_records(found), _manifest_of)
        index = Index.from_json(index_text)
        reader = MemoryReader(place, index)
        fetch = partial(self._fetch, what, found)
        fetch(index.files_of(SHARED_TREE) if self._ranks.is_first else set())
        tree_text = self._ranks.first(what, lambda: reader.read_bytes(SHARED_TREE))
        return restore(
            self._ranks, what, place, state, content=content, reader=reader, tree_text=tree_text, fetch=fetch
        )

    def drop(self, key: SnapshotKey) -> None:
        """Delete a damaged snapshot."""
        self._keep(lambda path: path.name != key.name)

    def keep_only(self, key: SnapshotKey | None) -> None:
        """Delete all snapshots except ``key``: this attempt continues from ``key``, or from a checkpoint."""
        self._keep(lambda path: key is not None and path.name == key.name)

    def _keep(self, wanted: Any) -> None:
        def remove() -> None:
            if self._is_local_main:
                snapshot_parts.remove_except(self._folder.path, wanted)

        self._ranks.run("old snapshots cannot be removed from memory", lambda: None)  # all ranks have read theirs
        self._ranks.run("old snapshots cannot be removed from memory", remove)

    def _own_records(self, found: FoundSnapshot) -> list[SnapshotRecord]:
        """The records that this rank reads: of the parts of which its node comes first among those that hold them."""
        if not self._is_local_main:
            return []
        node = self._folder.path.name
        return [
            snapshot_parts.read_record(self._folder.path, found.key, rank)
            for rank, held in enumerate(found.held)
            if min(held) == node
        ]

    # -- parts on other nodes

    def _fetch(self, what: str, found: FoundSnapshot, files: set[str]) -> None:
        """Receive those of ``files`` that this node lacks from nodes that hold them."""
        if len(set(found.nodes)) == 1:
            return  # this node holds all parts
        place = self._folder.path / found.key.name
        place.mkdir(mode=0o700, exist_ok=True)
        names = {Path(file).name for file in files}
        missing = {name for name in names if not (place / name).exists()}
        moves = self._ranks.reduce(what, lambda: missing, partial(_moves, found))

        def allocate() -> None:
            for part, _, target in moves:
                if target == self._ranks.rank:
                    _allocate(_incoming(place, part), found.sizes[part])

        self._ranks.run(what, allocate)
        for part, source, target in moves:
            path = place / rank_file(part)
            if self._ranks.rank == source:
                self._transfer(path, found.sizes[part], source=source, target=target)
            elif self._ranks.rank == target:
                self._transfer(_incoming(place, part), found.sizes[part], source=source, target=target)
                os.rename(_incoming(place, part), path)
        self._ranks.run(what, lambda: None)

    def _transfer(self, file: Path, size: int, *, source: int, target: int) -> None:
        if size == 0:
            return
        with file.open("r+b") as opened:
            content = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
            for chunk in content.split(CHUNK_BYTES):  # type: ignore[no-untyped-call]
                self._ranks.exchange(chunk, source=source, target=target)


class MemoryReader(ShardReader):
    """Reads the parts of a snapshot from this node's memory."""

    def offer(self, plan: LoadPlan, kinds: Mapping[str, str]) -> None:
        """Nothing: the parts are in memory that all ranks of the node share."""

    @contextmanager
    def _files(self) -> Iterator[Callable[[str], StoredFile]]:
        opened: dict[str, MappedFile] = {}

        def open_file(name: str) -> StoredFile:
            if name not in opened:
                opened[name] = MappedFile(self._directory / Path(name).name)  # the parts lie in one folder
            return cast(StoredFile, opened[name])  # the same methods

        try:
            yield open_file
        finally:
            for file in opened.values():
                os.close(file.descriptor)


def _is_older(key: SnapshotKey, committed: dict[str, Any] | None) -> bool:
    """Whether the training continues from the committed checkpoint: it is of a later step, or of a later attempt, in
    which case the snapshot belongs to an abandoned branch."""
    if committed is None:
        return False
    attempt = committed.get("attempt")
    return int(committed["step"]) > key.step or (isinstance(attempt, int) and attempt > key.attempt)


def _manifest_of(records: Iterable[list[SnapshotRecord]]) -> tuple[dict[str, Any], bytes]:
    found = sorted((record for those in records for record in those), key=lambda record: record.rank)
    return snapshot_parts.facts_of(found), index_of(record.written for record in found)


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


def _moves(found: FoundSnapshot, missing: list[set[str]]) -> list[tuple[int, int, int]]:
    """The transfers that bring each missing part once to each node: part, sending rank, receiving rank.

    Raises:
        CheckpointError: no node of this attempt holds a part.
    """
    parts = {rank_file(rank): rank for rank in range(len(found.held))}
    moves: dict[tuple[int, str], tuple[int, int, int]] = {}
    for rank, names in enumerate(missing):
        for name in sorted(names):
            part = parts[name]
            source = next((other for other, node in enumerate(found.nodes) if node in found.held[part]), None)
            if source is None:
                raise CheckpointError(f"no node holds {name}")
            moves.setdefault((part, found.nodes[rank]), (part, source, rank))
    return list(moves.values())
