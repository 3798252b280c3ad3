"""Storage backend for ``torch.distributed.checkpoint`` (DCP) that stores a checkpoint's tensors in one file per rank.

A rank's file, ``rank_00003.bin``, holds its chunks as raw bytes (row-major, in the machine's byte order), each padded
to a multiple of 64 bytes. Only tensors are stored; all other values are packed into a tensor (see ``tree``). The files
of more than 64 ranks lie in folders (see ``rank_blocks``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit, manifest_writer
from hpcaccel.checkpoint.chunk_reading import read_chunks
from hpcaccel.checkpoint.chunk_targets import ChunkTarget, chunk_targets, wrong_crc
from hpcaccel.checkpoint.index_parts import IndexSource, read_whole
from hpcaccel.checkpoint.manifest_writer import Index, Piece
from hpcaccel.checkpoint.node_sharing import LEAST_PART_BYTES, WHOLE, Offer, Share, offer, open_rings
from hpcaccel.checkpoint.rank_blocks import block_of, make_block_folder, stored_file
from hpcaccel.checkpoint.shard_files import crc32, why_not_written
from hpcaccel.checkpoint.snapshot_memory import RING_BYTES, SnapshotMemory, raw_bytes, stream
from hpcaccel.checkpoint.stored_file import StoredFile
from hpcaccel.checkpoint.tree import dtype_name
from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.errors import CheckpointError

__all__ = ["ShardReader", "ShardWriter", "item_bytes", "planned_chunks", "raw_bytes", "stored_lengths", "tensor_of"]

ALIGNMENT_BYTES = 64
"""The size of each chunk in a file is padded to a multiple of this."""


class ShardWriter(StorageWriter):
    """Writes this rank's file and, on rank 0, index and manifest into ``directory``, which exists and is empty.

    Args:
        rank: number in the name of this process's file.
        ranks: number of ranks that save.
        facts: arguments of ``manifest_writer.describe``; used on rank 0.
        wide: see ``AgreedPlan``; also ``others``.
        memory: the buffer through which the file is written; None allocates one for this file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        ranks: int = 1,
        facts: dict[str, Any],
        wide: Container[str] = (),
        others: Sequence[int] = (),
        memory: SnapshotMemory | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._file = stored_file(rank, ranks)
        self._first_block = block_of(0, ranks)
        self._facts = facts
        self._wide = wide
        self._others = others
        self._memory = memory

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Like ``write``. Returns a completed future."""
        done: Future[list[WriteResult]] = Future()
        files = self.write(plan, planner)
        done.set_result([WriteResult(MetadataIndex(file.file), file.bytes, file) for file in files])
        return done

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WrittenFile]:
        """Write and fsync this rank's file. Returns it, or nothing if the plan is empty.

        Raises:
            CheckpointError: the file cannot be written, or an item of the plan is not a tensor.
        """
        if not plan.items:
            return []
        try:
            return [self._write_file(plan, planner)]
        except OSError as error:
            path = self._directory / self._file
            why = why_not_written(error, self._directory, sum(stored_lengths(plan)))
            raise CheckpointError(f"cannot write {path}: {why}") from None

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> WrittenFile:
        name, lengths = self._file, stored_lengths(plan)
        make_block_folder(self._directory, name)
        tensors = (raw_bytes(tensor_of(item, planner)) for item in plan.items)
        memory = self._memory or SnapshotMemory(min(sum(lengths), RING_BYTES))
        crcs = stream(memory, self._directory / name, zip(tensors, lengths, strict=True))
        return WrittenFile.of(name, crcs, lengths, planned_chunks(plan, self._wide), self._others)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index and manifest; called on rank 0 after all files are written. See ``commit.write_manifest``."""
        files: list[WrittenFile] = [result.storage_data for of_rank in results for result in of_rank]
        facts = manifest_writer.describe(**self._facts)
        commit.write_manifest(self._directory, files=files, facts=facts, block=self._first_block)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).parent.is_dir()


class ShardReader(StorageReader):
    """Reads the checkpoint in ``directory``, and checks the CRC of every chunk that it reads.

    Args:
        index: the checkpoint's index; None means that it is read from the directory.
        parts: the parts of the index that are not in it yet.
    """

    def __init__(self, directory: Path, index: Index | None = None, parts: IndexSource | None = None) -> None:
        self._directory = Path(directory)
        self._index = index
        self.parts = parts
        self._kinds: Mapping[str, str] = {}
        self._shares: Mapping[str, Share] = {}

    @property
    def index(self) -> Index:
        if self._index is None:
            self._index = read_whole(self._directory)
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._directory, self._index = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan``, file by file and front to back.

        Raises:
            Damaged: a file is missing, too short, or differs from the committed one.
        """
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        pieces = [self.index.pieces[item.storage_index] for item in plan.items]
        chunks = chunk_targets(zip(pieces, plan.items, targets, strict=True), self.index.tensor)
        rings = open_rings(self._shares)
        common: dict[str, list[ChunkTarget]] = {kind: [] for kind in rings}
        alone: list[ChunkTarget] = []
        for chunk in chunks:
            kind = self._kind(chunk.key, chunk.piece)
            (alone if kind is None else common.get(kind, alone)).append(chunk)
        try:
            with self._files() as open_file:
                read_chunks(alone, open_file, [(rings[kind], common[kind]) for kind in rings])
        finally:
            for ring in rings.values():
                ring.close()
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def offer(self, plan: LoadPlan, kinds: Mapping[str, str]) -> Offer | None:
        """What this rank can share with other ranks of its node; see ``node_sharing``.

        Args:
            kinds: the kinds of the tensors, by key, that other ranks of the node may read too; ``WHOLE`` for a tensor
                that is not distributed.
        """
        self._kinds = kinds
        indices = (item.storage_index for item in plan.items)
        found = ((index.fqn, self.index.pieces[index]) for index in indices)
        return offer((kind, piece) for key, piece in found if (kind := self._kind(key, piece)) is not None)

    def _kind(self, key: str, piece: Piece) -> str | None:
        """The kind of a chunk that is shared; None for one that is not. Small parts of distributed tensors are not: the
        ranks that need the same parts of the large tensors may need different ones of those."""
        kind = self._kinds.get(key)
        return None if kind != WHOLE and piece.stored < LEAST_PART_BYTES else kind

    def share(self, shares: Mapping[str, Share]) -> None:
        """Read together with the ranks of groups, by kind."""
        self._shares = shares

    def read_bytes(self, key: str) -> bytes:
        """All bytes of a tensor that was written in one chunk.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
            Damaged: the bytes differ from the committed ones.
        """
        piece = self.index.pieces[MetadataIndex(key, self.index.tensor(key).chunks[0].offsets)]
        with self._files() as open_file:
            data = open_file(piece.file).read(piece.offset, piece.stored, key)
        if crc32(data) != piece.crc32:
            raise wrong_crc(self._directory / piece.file, piece, key)
        return bytes(data[: piece.length])

    @contextmanager
    def _files(self) -> Iterator[Callable[[str], StoredFile]]:
        """Yield a function that opens a file by name. Each file is opened once, and closed at the end of the block."""
        opened: dict[str, StoredFile] = {}

        def open_file(name: str) -> StoredFile:
            if name not in opened:
                opened[name] = StoredFile(self._directory / name)
            return opened[name]

        try:
            yield open_file
        finally:
            for file in opened.values():
                os.close(file.descriptor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return checkpoint_files.read_manifest(Path(checkpoint_id)) is not None


def tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The tensor of one item of a plan.

    Raises:
        CheckpointError: the item is an object that DCP would pickle.
    """
    if item.type is WriteItemType.BYTE_IO:
        raise CheckpointError(f"{item.index.fqn} is not a tensor: convert it with tree.pack()")
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def stored_lengths(plan: SavePlan) -> list[int]:
    """Stored size in bytes of each chunk of a plan, including padding."""
    return [length + -length % ALIGNMENT_BYTES for length in map(item_bytes, plan.items)]


def planned_chunks(plan: SavePlan, wide: Container[str] = ()) -> list[PlannedChunk]:
    """What the plan's items are, for the index. Objects that are not tensors, which ``tensor_of`` rejects, are left
    out.

    Args:
        wide: the keys of tensors that have more chunks than a block has ranks.
    """
    return [
        PlannedChunk(
            item.index.fqn,
            dtype_name(data.properties.dtype),
            list(data.size),
            list(data.chunk.offsets),
            list(data.chunk.sizes),
            item_bytes(item),
            item.index.fqn in wide or item.index.fqn.startswith(OWN_KEYS),
        )
        for item in plan.items
        if (data := item.tensor_data) is not None
    ]


def item_bytes(item: WriteItem) -> int:
    """Size in bytes of a chunk; 0 for an object that is not a tensor, which ``tensor_of`` rejects."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
