"""The plan of the save before is used again as long as the tensors of all ranks have the same layout."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpcaccel.checkpoint.dcp_storage import tensor_of
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.save_content import SaveContent
from hpcaccel.checkpoint.save_plan import PlanCache
from hpcaccel.errors import CheckpointError

from .world import run_ranks

pytestmark = pytest.mark.torch


def saves(rank):
    """For each of several saves: whether the plan is that of the save before, whether DCP planned on this rank, the
    chunks of the plan, and the bytes that they resolve to."""
    mesh = init_device_mesh("cpu", (2,))
    of_dcp = []
    create = DefaultSavePlanner.create_local_plan
    DefaultSavePlanner.create_local_plan = lambda self: of_dcp.append(1) or create(self)
    cache, ranks = PlanCache(), CheckpointRanks(rank=rank, world_size=2)
    last, found = None, []

    def content(value, *, size=8, dtype=torch.float32, placement=None, own=3, together=True):
        split = distribute_tensor(torch.full((size, 2), value, dtype=dtype), mesh, [placement or Shard(0)])
        tensors = {"x": split, "whole": torch.full((4,), value), f"rank.{rank}.own": torch.full((own,), value)}
        return SaveContent(tensors, frozenset({"whole"} if together else ()))

    def unless_rank_1(content):
        if rank == 1:
            raise ValueError("nothing to save")
        return content

    for collect in (
        lambda: content(1.0),
        lambda: content(2.0),
        lambda: content(3.0, size=6),
        lambda: content(4.0, size=6, dtype=torch.float64),
        lambda: content(5.0, size=6, dtype=torch.float64, placement=Shard(1)),
        lambda: content(6.0, own=4 if rank else 3),
        lambda: content(7.0, own=5 if rank else 3),
        lambda: content(8.0, own=5 if rank else 3),
        lambda: unless_rank_1(content(9.0)),
        lambda: content(10.0, own=5 if rank else 3),
        lambda: content(11.0, own=5 if rank else 3, together=False),
        lambda: content(12.0, placement=Replicate()),
    ):
        of_dcp.clear()
        try:
            plan, planner = cache.plan(ranks, what="no", collect=collect, begin=list)
        except CheckpointError as error:
            found.append(str(error))
            continue
        chunks = [(key, at) for key, _, _, at, *_ in json.loads(plan.chunks)]
        values = {float(tensor_of(item, planner).reshape(-1)[0]) for item in plan.own.items}
        found.append((plan is last, bool(of_dcp), chunks, values))
        last = plan
    return found


def test_only_a_save_of_the_same_layout_on_all_ranks_uses_the_plan_again():
    results = run_ranks(saves)
    for rank, found in enumerate(results):
        assert found[8].startswith("no: ValueError: nothing to save (rank 1")
        planned = [entry for entry in found if not isinstance(entry, str)]
        # Another rank's new layout makes a new plan for this rank, too, but DCP need not plan again here.
        assert [again for again, *_ in planned] == [
            False, True, False, False, False, False, False, True, True, False, False,
        ]  # fmt: skip
        assert [by_dcp for _, by_dcp, *_ in planned] == [
            True, False, True, True, True, True, rank == 1, False, False, True, True,
        ]  # fmt: skip
        numbers = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12)
        for number, (*_, values) in zip(numbers, planned, strict=True):
            assert values == {float(number)}
    placed = [[at for key, at in found[save][2] if key == "x"] for save in (0, 2, 4) for found in results]
    assert placed == [[[0, 0]], [[4, 0]], [[0, 0]], [[3, 0]], [[0, 0]], [[0, 1]]]
