"""The bytes of a checkpoint, behind DCP's public interfaces: its planners say who writes and reads what.

Each rank writes one file, ``rank_00003.bin``: its chunks one behind the other as raw bytes (row-major, the machine's
byte order), each padded to a multiple of 64 bytes. Nothing but tensors is stored; whatever else belongs to a
checkpoint has been made one (see ``tree``). A file that is written in the background has the same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import manifest_writer
from hpcaccel.checkpoint.crc import combined_crc, crc32
from hpcaccel.checkpoint.file_reader import Batch, StoredFile, batches, check, other_crc, read_into
from hpcaccel.checkpoint.manifest_writer import FileRecord, Index, Piece
from hpcaccel.checkpoint.snapshot_memory import RING_BYTES, Memory, raw_bytes, stream
from hpcaccel.checkpoint.writer_files import rank_file, why_not_written
from hpcaccel.core.run_dir import atomic_write
from hpcaccel.errors import CheckpointError

__all__ = ["ShardReader", "ShardWriter", "pieces_of", "rank_file", "raw_bytes", "stored_lengths"]

ALIGNMENT_BYTES = 64
READERS = 4
"""Threads: while some check what they have read the others wait for the disk."""


class ShardWriter(StorageWriter):
    """Writes a checkpoint into ``directory``, which is there and empty.

    Args:
        rank: names this process's file.
        facts: what the manifest says besides files and versions (step, epoch, world size …); used on rank 0.
        memory: what the bytes go through; made for this file alone where there is none yet.
    """

    def __init__(self, directory: Path, *, rank: int, facts: dict[str, Any], memory: Memory | None = None) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._facts = facts
        self._memory = memory
        self.bytes = 0
        """Of the whole checkpoint, on rank 0, when it is finished."""

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
        """Write and fsync this rank's file.

        The results are one for each chunk, with its ``Piece``, and a last one for the file, with its ``FileRecord``.
        """
        try:
            results = self._write_file(plan, planner) if plan.items else []
        except OSError as error:
            path = self._directory / rank_file(self._rank)
            said = why_not_written(error, self._directory, sum(stored_lengths(plan)))
            raise CheckpointError(f"cannot write {path}: {said}") from None
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name, lengths = rank_file(self._rank), stored_lengths(plan)
        pieces = (
            (raw_bytes(self._tensor(item, planner)), length) for item, length in zip(plan.items, lengths, strict=True)
        )
        memory = self._memory or Memory(min(sum(lengths), RING_BYTES))
        crcs = stream(memory, self._directory / name, pieces)
        results = [
            WriteResult(item.index, piece.length, piece)
            for item, piece in zip(plan.items, pieces_of(plan, self._rank, crcs), strict=True)
        ]
        file = FileRecord(name, sum(lengths), combined_crc(zip(crcs, lengths, strict=True)))
        results.append(WriteResult(MetadataIndex(name), file.bytes, file))
        return results

    def snapshot(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy this rank's file into the writer's memory, for a process that writes it."""
        assert self._memory is not None
        self._memory.snapshot((self._tensor(item, planner) for item in plan.items), stored_lengths(plan))

    def _tensor(self, item: WriteItem, planner: SavePlanner) -> torch.Tensor:
        if item.type is WriteItemType.BYTE_IO:
            raise CheckpointError(f"{item.index.fqn} is not a tensor: make it one with tree.pack()")
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are written: check coverage, write the index, then the manifest as the last file.

        Raises:
            CheckpointError: a tensor is not covered by what the ranks wrote.
        """
        flat = [result for of_rank in results for result in of_rank]
        files = [result.storage_data for result in flat if isinstance(result.storage_data, FileRecord)]
        pieces = {result.index: result.storage_data for result in flat if isinstance(result.storage_data, Piece)}
        text = Index(metadata, pieces).to_json()
        atomic_write(self._directory / manifest_writer.INDEX, text)
        files.append(FileRecord(manifest_writer.INDEX, len(text), crc32(text)))
        content = manifest_writer.build(files=files, **self._facts)
        self.bytes = content["bytes"]
        atomic_write(self._directory / checkpoint_files.MANIFEST, manifest_writer.seal(content))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).parent.is_dir()


class ShardReader(StorageReader):
    """Reads the checkpoint in ``directory``, every byte that it uses checked against its CRC.

    Args:
        index: where everything lies; read from the directory when it is not given.
    """

    def __init__(self, directory: Path, index: Index | None = None) -> None:
        self._directory = Path(directory)
        self._index = index

    @property
    def index(self) -> Index:
        if self._index is None:
            text = manifest_writer.read_index(self._directory, manifest_writer.read(self._directory))
            self._index = Index.from_json(text)
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
        """Read what the plan asks for, file by file and front to back.

        Raises:
            Damaged: a file is missing, too short, or not what was committed.
        """
        work = sorted(((self.index.pieces[item.storage_index], item) for item in plan.items), key=_place)
        targets = [planner.resolve_tensor(item).detach() for _, item in work]
        with self._files() as open_file, ThreadPoolExecutor(READERS) as readers:
            found = list(batches(work, targets))
            for batch, later in zip(found, [*found[READERS:], *[None] * READERS], strict=False):
                batch.file, batch.later = open_file(batch.pieces[0].file), later
            for batch in found[:READERS]:
                batch.announce()
            try:
                # In order, so that the first thing that is wrong is told of, whoever finds another one sooner.
                for _ in readers.map(self._read_batch, found):
                    pass
            finally:
                readers.shutdown(cancel_futures=True)
        for target, (_, item) in zip(targets, work, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_bytes(self, key: str) -> bytes:
        """All bytes of a tensor that was written in one chunk.

        Raises:
            Damaged: they are not what was committed.
        """
        piece = self.index.pieces[MetadataIndex(key, self.index.tensor(key).chunks[0].offsets)]
        with self._files() as open_file:
            data = open_file(piece.file).read(piece.offset, piece.stored, key)
        check(self._directory / piece.file, piece, key, memoryview(data))
        return bytes(data[: piece.length])

    def _read_batch(self, batch: Batch) -> None:
        """Straight into the tensor where its memory allows, else through a buffer."""
        assert batch.file is not None
        if batch.later is not None:
            batch.later.announce()
        with torch.no_grad():
            if len(batch.items) == 1 and self._fits(batch.items[0], batch.pieces[0], batch.targets[0]):
                self._read_straight(batch.file, batch.pieces[0], batch.items[0], batch.targets[0])
                return
            begin = batch.pieces[0].offset
            data = memoryview(batch.file.read(begin, batch.end - begin, batch.items[0].storage_index.fqn))
            checked: set[int] = set()
            for piece, item, target in zip(batch.pieces, batch.items, batch.targets, strict=True):
                at = piece.offset - begin
                if piece.offset not in checked:
                    check(batch.file.path, piece, item.storage_index.fqn, data[at : at + piece.stored])
                    checked.add(piece.offset)
                self._place(data[at : at + piece.length], item, target)

    def _fits(self, item: ReadItem, piece: Piece, target: torch.Tensor) -> bool:
        """Whether the chunk and the target are the same bytes."""
        dtype = self.index.tensor(item.storage_index.fqn).properties.dtype
        whole = piece.length == target.numel() * target.element_size()
        return whole and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype

    def _read_straight(self, file: StoredFile, piece: Piece, item: ReadItem, target: torch.Tensor) -> None:
        key = item.storage_index.fqn
        if read_into(raw_bytes(target), file.parts(piece.offset, piece.stored, key)) != piece.crc32:
            raise other_crc(file.path, piece, key)

    def _place(self, data: memoryview, item: ReadItem, target: torch.Tensor) -> None:
        """The part of a chunk that is asked for, into its target."""
        if not len(data):
            return
        tensor = self.index.tensor(item.storage_index.fqn)
        sizes = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == item.storage_index.offset)
        source = torch.frombuffer(data, dtype=torch.uint8).clone().view(tensor.properties.dtype).reshape(sizes)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dimension, start, length)
        target.copy_(source)

    @contextmanager
    def _files(self) -> Iterator[Callable[[str], StoredFile]]:
        """A function that opens a file of the checkpoint, each one once."""
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


def stored_lengths(plan: SavePlan) -> list[int]:
    """How many bytes each chunk of a plan takes in its file."""
    return [length + -length % ALIGNMENT_BYTES for length in map(_length, plan.items)]


def pieces_of(plan: SavePlan, rank: int, crcs: Sequence[int] | None = None) -> list[Piece]:
    """Where each chunk of a rank's plan lies, known before it is written; without ``crcs`` their CRCs are zero."""
    lengths = stored_lengths(plan)
    offsets = accumulate(lengths, initial=0)
    return [
        Piece(rank_file(rank), offset, _length(item), stored, crc)
        for item, offset, stored, crc in zip(plan.items, offsets, lengths, crcs or [0] * len(lengths), strict=False)
    ]


def _length(item: WriteItem) -> int:
    """The bytes of a chunk; of what is no tensor none, for it is refused when its turn comes."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _place(work: tuple[Piece, ReadItem]) -> tuple[str, int]:
    return work[0].file, work[0].offset
