"""DCP's planners at work: who writes which chunk, and who reads what when the ranks are others than then.

The order of calls is that of ``torch.distributed.checkpoint.save`` and ``load``; the talking between the ranks is ours
(see ``ranks``), so that an error is the same on all of them and no exception object has to travel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hpcaccel.checkpoint.ranks import Ranks
from hpcaccel.checkpoint.storage import ShardReader, ShardWriter

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(
    ranks: Ranks,
    writer: ShardWriter,
    *,
    what: str,
    collect: Callable[[], dict[str, torch.Tensor]],
    begin: Callable[[], None],
    commit: Callable[[], None],
) -> None:
    """Write the tensors of all ranks as one checkpoint.

    Args:
        what: begins the errors' messages.
        collect: gives this rank's tensors by key. Keys that several ranks hold are written once.
        begin: runs on rank 0 when all ranks have planned and before any of them writes.
        commit: runs on rank 0 when everything is on the disk.

    Raises:
        CheckpointError: on all ranks, when anything failed on any of them.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({})

    def plan_local() -> SavePlan:
        planner.set_up_planner(collect(), is_coordinator=ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_global(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        begin()
        return plans

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(plan), planner).wait()

    def finish(results: list[list[WriteResult]]) -> None:
        writer.finish(metadata, results)
        commit()

    plan = ranks.reduce_scatter(what, plan_local, plan_global)
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
