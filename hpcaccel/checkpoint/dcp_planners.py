"""DCP's planners at work: who writes which chunk, and who reads what when the ranks are others than then.

The order of calls is that of ``torch.distributed.checkpoint.save`` and ``load``; the talking between the ranks is ours
(see ``rank_agreement``), so that an error is the same on all of them and no exception object has to travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hpcaccel.checkpoint.dcp_storage import ShardReader, ShardWriter, pieces_of, stored_lengths
from hpcaccel.checkpoint.manifest_writer import Index, Piece
from hpcaccel.checkpoint.rank_agreement import Ranks

__all__ = ["Planned", "SavePlanning", "read_tensors", "write_tensors"]


@dataclass(frozen=True)
class Planned:
    """Who writes what, agreed on by all ranks.

    Args:
        own: this rank's part.
        metadata: what all write together, on rank 0.
        pieces: where every chunk of all ranks will lie, on rank 0; CRCs zero.
    """

    own: SavePlan
    metadata: Metadata
    pieces: dict[MetadataIndex, Piece]

    @property
    def file_bytes(self) -> int:
        """Of this rank's file."""
        return sum(stored_lengths(self.own))

    @cached_property
    def index(self) -> bytes:
        """The index of the checkpoint, CRCs zero. On rank 0.

        Raises:
            CheckpointError: a tensor is not covered.
        """
        return Index(self.metadata, self.pieces).to_json()


class SavePlanning:
    """Plans saves, and remembers the last plan: from one save to the next hardly anything but the bytes changes, and
    then the ranks need only say so."""

    def __init__(self) -> None:
        self._local: SavePlan | None = None
        self._planned: Planned | None = None

    def plan(
        self,
        ranks: Ranks,
        writer: ShardWriter,
        *,
        what: str,
        collect: Callable[[], dict[str, torch.Tensor]],
        begin: Callable[[], None],
    ) -> tuple[Planned, DefaultSavePlanner]:
        """
        Args:
            what: begins the errors' messages.
            collect: gives this rank's tensors by key. Keys that several ranks hold are written once.
            begin: runs on rank 0 when all ranks have planned and before any of them writes.

        Raises:
            CheckpointError: on all ranks, when anything failed on any of them.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        local: SavePlan | None = None

        def plan_local() -> bool:
            nonlocal local
            planner.set_up_planner(collect(), is_coordinator=ranks.is_first)
            writer.set_up_storage_writer(ranks.is_first)
            local = writer.prepare_local_plan(planner.create_local_plan())
            return self._planned is not None and local == self._local

        def as_before(same: list[bool]) -> bool:
            if all(same):
                begin()
            return all(same)

        if not ranks.reduce(what, plan_local, as_before):
            assert local is not None
            self._planned = self._plan_together(ranks, writer, planner, what, local, begin)
            self._local = local
        assert self._planned is not None
        return self._planned, planner

    def _plan_together(
        self,
        ranks: Ranks,
        writer: ShardWriter,
        planner: DefaultSavePlanner,
        what: str,
        local: SavePlan,
        begin: Callable[[], None],
    ) -> Planned:
        metadata = Metadata({})
        pieces: dict[MetadataIndex, Piece] = {}

        def plan_global(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
            for rank, plan in enumerate(plans):
                places = pieces_of(plan, rank)
                pieces.update({item.index: piece for item, piece in zip(plan.items, places, strict=True)})
            begin()
            return plans

        plan = ranks.reduce_scatter(what, lambda: local, plan_global)
        return Planned(planner.finish_plan(plan), metadata, pieces)


def write_tensors(
    ranks: Ranks,
    writer: ShardWriter,
    planned: Planned,
    planner: DefaultSavePlanner,
    *,
    what: str,
    commit: Callable[[], None],
) -> None:
    """Write the tensors of all ranks as one checkpoint, and wait until they are on the disk.

    Args:
        commit: runs on rank 0 when everything is there.

    Raises:
        CheckpointError: on all ranks, when anything failed on any of them.
    """

    def write() -> list[WriteResult]:
        return writer.write_data(planned.own, planner).wait()

    def finish(results: list[list[WriteResult]]) -> None:
        writer.finish(planned.metadata, results)
        commit()

    ranks.reduce(what, write, finish)


def read_tensors(
    ranks: Ranks,
    reader: ShardReader,
    *,
    what: str,
    collect: Callable[[], dict[str, torch.Tensor]],
) -> None:
    """Fill the tensors that ``collect`` gives from the checkpoint, in place and by key, whatever ranks wrote them.

    Raises:
        Damaged: on all ranks, when any of them read bytes that are not what was committed.
        CheckpointError: on all ranks, when anything else failed on any of them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_local() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(collect(), metadata, ranks.is_first)
        reader.set_up_storage_reader(metadata, ranks.is_first)
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_global(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    plan = ranks.reduce_scatter(what, plan_local, plan_global)
    ranks.run(what, lambda: reader.read_data(planner.finish_plan(plan), planner).wait())
