"""The index of a snapshot in memory, put together from the records of its parts.

If there are more ranks than a block has, the index that all ranks receive lacks the chunks of tensors that have more
chunks than a block has ranks, like ``index.json`` of such a checkpoint. A rank adds those that its node holds: with an
unchanged layout these are all that it loads, so what it receives and reads does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan

from hpcaccel.checkpoint import snapshot_parts
from hpcaccel.checkpoint.index_parts import lacking
from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey, SnapshotRecord
from hpcaccel.checkpoint.written_file import check_coverage, elements_of, index_text, tensors_of
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.errors import CheckpointError

__all__ = ["NodeParts", "SnapshotSummary"]


@dataclass
class SnapshotSummary:
    """What the records of some parts have of the index.

    Args:
        tensors: by key, as in the index.
        elements: number of elements of each tensor in these parts, also of the chunks that are left out.
        facts: see ``SnapshotRecord``; None without rank 0's record.
    """

    tensors: dict[str, Any]
    elements: dict[str, int]
    facts: dict[str, Any] | None

    @classmethod
    def of(cls, records: Iterable[SnapshotRecord], *, whole: bool) -> SnapshotSummary:
        """Args: whole: whether to include the chunks that ``PlannedChunk.in_block`` marks."""
        records = list(records)
        files = [record.written for record in records]
        tensors = tensors_of(files, lambda chunk: whole or not chunk.in_block)
        elements = {key: elements_of(tensor["chunks"]) for key, tensor in tensors.items()}
        if not whole:
            left_out = tensors_of(files, lambda chunk: chunk.in_block and not chunk.key.startswith(OWN_KEYS))
            for key, tensor in left_out.items():
                tensors.setdefault(key, {**tensor, "chunks": []})
                elements[key] = elements.get(key, 0) + elements_of(tensor["chunks"])
        return cls(tensors, elements, next((record.facts for record in records if record.facts is not None), None))

    def joined(self, other: SnapshotSummary) -> SnapshotSummary:
        """This summary, with the records of ``other`` added."""
        for key, tensor in other.tensors.items():
            self.tensors.setdefault(key, {**tensor, "chunks": []})["chunks"] += tensor["chunks"]
            self.elements[key] = self.elements.get(key, 0) + other.elements[key]
        self.facts = self.facts or other.facts
        return self

    def manifest_and_index(self) -> tuple[dict[str, Any], bytes]:
        """The facts for the manifest, and the index as JSON.

        Raises:
            Damaged: rank 0's record has no facts.
            CheckpointError: the chunks do not cover a tensor.
        """
        for key, tensor in self.tensors.items():
            check_coverage(key, tensor["shape"], self.elements[key])
        return snapshot_parts.required_facts(self.facts), index_text(self.tensors)


class NodeParts:
    """The chunks that the index lacks, from the records of the parts on this node; see ``IndexParts``.

    Args:
        folder: the node's folder. What is read is added to ``index``.
    """

    def __init__(self, folder: Path, key: SnapshotKey, index: Index) -> None:
        self._folder = folder
        self._key = key
        self._index = index
        self._read: set[int] = set()

    def read_of_rank(self, rank: int | None) -> None:
        """Read the record of the part of ``rank``, which this node holds; nothing for None.

        Raises:
            Damaged: the record is missing or damaged.
        """
        if rank is None or rank in self._read:
            return
        self._read.add(rank)
        record = snapshot_parts.read_record(self._folder, self._key, rank)
        self._index.add(index_text(tensors_of([record.written], lambda chunk: chunk.in_block)))

    def others_of(self, rank: int | None) -> set[int]:
        """The other ranks whose parts have chunks of ``rank``, see ``AgreedPlan``.

        Raises:
            Damaged: the record of ``rank`` is missing or damaged.
        """
        return set() if rank is None else set(snapshot_parts.read_record(self._folder, self._key, rank).written.others)

    def read_missing(self, tensors: Mapping[str, torch.Tensor], plan: LoadPlan) -> bool:
        """Read the records of the node's other parts if ``plan`` does not cover all ``tensors``.

        Returns:
            Whether anything was read, so that a new plan is needed.

        Raises:
            CheckpointError: the parts on this node do not have all chunks that this rank loads.
        """
        if not (missing := lacking(tensors, plan)):
            return False
        unread = snapshot_parts.ranks_in(self._folder, self._key) - self._read
        if not unread:
            raise CheckpointError(f"this node does not hold all chunks of {missing[0]} that this rank loads")
        for rank in sorted(unread):
            self.read_of_rank(rank)
        return True
