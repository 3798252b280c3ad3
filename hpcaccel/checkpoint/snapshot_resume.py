"""Resume from a snapshot in the memory of the nodes: agree on the newest complete one, collect its parts, restore.

The snapshot may be of another number of ranks, as a checkpoint may: ``restore`` then reads each tensor from the parts
that contain it. So each node receives those parts that its ranks read and that it does not hold.

The ranks of a snapshot of several blocks first try with the chunks in the index that their node holds. Only if that is
not enough on some rank, they all receive the chunks of all parts.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.planner import LoadPlan

from hpcaccel.checkpoint import snapshot_parts
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.guarantees import rank_sources
from hpcaccel.checkpoint.loading import LoadedCheckpoint, restore
from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import block_of
from hpcaccel.checkpoint.shard_files import rank_file
from hpcaccel.checkpoint.snapshot_index import NodeParts, SnapshotSummary
from hpcaccel.checkpoint.snapshot_parts import Holdings, MappedFile, RankedSnapshot, SnapshotKey, SnapshotRecord
from hpcaccel.checkpoint.snapshot_transfer import FoundSnapshot, PartHolders, PartTransfer
from hpcaccel.checkpoint.stored_file import StoredFile
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["SnapshotResume"]

log = logging.getLogger(__name__)


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

        def choose(reports: list[tuple[str, Holdings]]) -> list[FoundSnapshot | None]:
            newest = snapshot_parts.complete(holdings for _, holdings in reports)
            if newest is None or _is_older(newest.key, committed):
                return [None] * len(reports)
            return list(_found(newest, reports))

        def report() -> tuple[str, Holdings]:
            folder = self._folder.path
            return folder.name, snapshot_parts.holdings(folder) if self._is_local_main else {}

        return self._ranks.reduce_scatter("the snapshots in memory cannot be read", report, choose)

    def load(self, found: FoundSnapshot, state: TrainingState) -> LoadedCheckpoint:
        """Restore ``state`` in place, and check the CRCs of what is read.

        Raises:
            Damaged: on all ranks, if a part is damaged, or a node has no memory for the parts that it lacks. ``state``
            may be partly restored.
            CheckpointError: on all ranks, if the snapshot is of another model.
        """
        if found.parts == self._ranks.world_size and block_of(0, found.parts) is not None:
            try:
                return self._load(found, state, whole=False)
            except Damaged:
                raise
            except CheckpointError as error:  # on all ranks, mostly before anything was read
                if self._ranks.is_first:
                    log.info("the chunks of all parts of the snapshot are collected: %s", error)
        return self._load(found, state, whole=True)

    def _load(self, found: FoundSnapshot, state: TrainingState, *, whole: bool) -> LoadedCheckpoint:
        """See ``load``.

        Args:
            whole: whether all ranks receive the index with the chunks of all parts.
        """
        place = self._folder.path / found.key.name
        what = f"the snapshot of step {found.key.step} in memory cannot be loaded"
        content, index_text = self._ranks.fold(
            what,
            lambda: SnapshotSummary.of(self._own_records(found), whole=whole),
            SnapshotSummary.joined,
            SnapshotSummary.manifest_and_index,
        )
        index = Index.from_json(index_text)
        parts = None if whole else NodeParts(self._folder.path, found.key, index)
        reader = MemoryReader(place, index, parts)
        fetch = PartTransfer(self._ranks, self._folder.path, found, what).fetch
        files = index.files_of(SHARED_TREE) if self._ranks.is_first else set()
        source = rank_sources(content, world_size=self._ranks.world_size, mesh=state.mesh)[self._ranks.rank]
        if source is not None:
            files.add(rank_file(source))
        fetch(files)
        if parts is not None:  # with hybrid sharding, other replicas have saved some of this rank's chunks
            others = self._ranks.run(what, partial(parts.others_of, source))
            fetch({rank_file(other) for other in others})
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
        """The records that this rank reads for all ranks."""
        return [snapshot_parts.read_record(self._folder.path, found.key, rank) for rank in found.read_here]


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


def _found(newest: RankedSnapshot, reports: list[tuple[str, Holdings]]) -> Iterator[FoundSnapshot]:
    """For each rank what it needs to know of the snapshot. A record is read on the node that comes first among those
    that hold the part, by the rank that has reported the node's parts."""
    held: defaultdict[int, set[str]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for node, holdings in reports:
        for rank, size in holdings.get(newest, {}).items():
            held[rank].add(node)
            sizes[rank] = size
    every, nodes = range(newest.world_size), tuple(node for node, _ in reports)
    holders = PartHolders(nodes, tuple(frozenset(held[rank]) for rank in every), tuple(sizes[rank] for rank in every))
    count, moved = len(set(nodes)), holders.moved
    for rank, (node, holdings) in enumerate(reports):
        here = tuple(sorted(part for part in holdings.get(newest, {}) if min(held[part]) == node))
        yield FoundSnapshot(newest.key, newest.world_size, count, moved, here, holders if rank == 0 else None)


def _is_older(key: SnapshotKey, committed: dict[str, Any] | None) -> bool:
    """Whether the training continues from the committed checkpoint: it is of a later step, or of a later attempt, in
    which case the snapshot belongs to an abandoned branch."""
    if committed is None:
        return False
    attempt = committed.get("attempt")
    return int(committed["step"]) > key.step or (isinstance(attempt, int) and attempt > key.attempt)
