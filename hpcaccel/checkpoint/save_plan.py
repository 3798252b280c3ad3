"""The plan of a save: which chunks each rank writes.

Each rank deduplicates its own plan (``plan_dedup``), and the ranks check together that nothing is missing or written
twice. Only if something is does rank 0 plan for all, as in ``torch.distributed.checkpoint.save``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint.dcp_storage import planned_chunks, stored_lengths
from hpcaccel.checkpoint.plan_dedup import Coverage, other_writers, own_items
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import block_of
from hpcaccel.checkpoint.save_content import SaveContent
from hpcaccel.errors import CheckpointError

__all__ = ["AgreedPlan", "PlanCache"]

Layout = tuple[list[tuple[Any, ...]], frozenset[str]]
"""What a rank's plan depends on: key, shape, dtype and sharding of each tensor, and which tensors all ranks have."""


@dataclass(frozen=True)
class AgreedPlan:
    """A rank's part of a plan on which all ranks have agreed.

    Args:
        own: the chunks that this rank writes.
        files: number of ranks that write any.
        wide: the keys of tensors that have more chunks than a block has ranks; empty if all ranks form one block.
        others: the other ranks that write this rank's chunks of the ``wide`` tensors, of which they have replicas.
            Empty if that is unknown, because rank 0 has planned.
    """

    own: SavePlan
    files: int
    wide: frozenset[str]
    others: tuple[int, ...] = ()

    @property
    def file_bytes(self) -> int:
        """Size of this rank's file in bytes."""
        return sum(stored_lengths(self.own))

    @cached_property
    def chunks(self) -> bytes:
        """JSON of the list of this rank's ``PlannedChunk``."""
        return json.dumps(planned_chunks(self.own, self.wide), separators=(",", ":")).encode()


class PlanCache:
    """Cache of the last plan. Usually only values change between two saves: the ranks then only exchange whether their
    tensors have the same layout as before, and DCP's planner, which is slow with sharded tensors, does not plan."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._local = SavePlan([])
        """This rank's own plan for tensors of this layout."""
        self._agreed: AgreedPlan | None = None

    def plan(
        self,
        ranks: CheckpointRanks,
        *,
        what: str,
        collect: Callable[[], SaveContent],
        begin: Callable[[], None],
    ) -> tuple[AgreedPlan, DefaultSavePlanner]:
        """Agree on a plan: the cached one if the tensors of all ranks have the same layout as before, else a new one.

        Args:
            what: the beginning of error messages.
            collect: returns what this rank may write. A tensor that several ranks have is written once.
            begin: called on rank 0 after all ranks have planned, before any rank writes.

        Returns:
            The plan, and DCP's planner, which resolves the plan's items to tensors.

        Raises:
            CheckpointError: on all ranks, if anything failed on any of them.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        content = SaveContent({})

        def plan_local() -> bool:
            nonlocal content
            content = collect()
            planner.set_up_planner(content.tensors, is_coordinator=ranks.is_first)
            if (layout := _layout(content)) != self._layout:
                self._agreed = self._layout = None
                self._local, self._layout = planner.create_local_plan(), layout
            return self._agreed is not None

        def begin_if_unchanged(unchanged: list[bool]) -> bool:
            if all(unchanged):
                begin()
            return all(unchanged)

        if not ranks.reduce(what, plan_local, begin_if_unchanged):
            self._agreed = None
            self._agreed = _new_plan(ranks, planner, what, self._local, content, begin)
        assert self._agreed is not None
        return self._agreed, planner


def _layout(content: SaveContent) -> Layout:
    described = []
    for key, tensor in content.tensors.items():
        sharding = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        described.append((key, tensor.shape, tensor.dtype, sharding))
    return described, content.replicated


def _new_plan(
    ranks: CheckpointRanks,
    planner: DefaultSavePlanner,
    what: str,
    local: SavePlan,
    content: SaveContent,
    begin: Callable[[], None],
) -> AgreedPlan:
    own: list[WriteItem] = []
    block = block_of(0, ranks.world_size)

    def deduplicated() -> Coverage:
        nonlocal own
        own = own_items(local.items, content, rank=ranks.rank, ranks=ranks.world_size)
        return Coverage.of(local.items, own, content, ranks=ranks.world_size)

    def begin_if_complete(coverage: Coverage) -> tuple[int, frozenset[str]] | None:
        if not coverage.is_complete:
            return None
        begin()
        return coverage.files, frozenset() if block is None else coverage.wide(block.ranks)

    found = ranks.fold(what, deduplicated, Coverage.joined, begin_if_complete)
    if found is None:
        return _plan_globally(ranks, planner, what, local, begin)
    files, wide = found
    others = other_writers(local.items, content, wide, rank=ranks.rank, ranks=ranks.world_size) if wide else ()
    return AgreedPlan(planner.finish_plan(SavePlan(own)), files, wide, tuple(others))


def _plan_globally(
    ranks: CheckpointRanks, planner: DefaultSavePlanner, what: str, local: SavePlan, begin: Callable[[], None]
) -> AgreedPlan:
    """Deduplicate the plans of all ranks on rank 0."""
    block = block_of(0, ranks.world_size)

    def plan_global(plans: list[SavePlan]) -> list[tuple[SavePlan, int, frozenset[str]]]:
        plans, metadata = planner.create_global_plan(plans)
        chunks = _chunks_of(metadata)
        files = sum(bool(plan.items) for plan in plans)
        wide = frozenset(key for key, count in chunks.items() if block is not None and count > block.ranks)
        begin()
        return [(plan, files, wide) for plan in plans]

    own, files, wide = ranks.reduce_scatter(what, lambda: local, plan_global)
    return AgreedPlan(planner.finish_plan(own), files, wide)


def _chunks_of(metadata: Metadata) -> dict[str, int]:
    """Number of chunks of each tensor.

    Raises:
        CheckpointError: the chunks of all ranks do not cover a tensor.
    """
    found = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        covered, wanted = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
        if covered != wanted:
            raise CheckpointError(
                f"{key} has {wanted} elements, but the chunks of all ranks together have {covered}. Check that all "
                "ranks build the same model"
            )
        found[key] = len(tensor.chunks)
    return found
