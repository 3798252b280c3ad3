"""Groups of many ranks: the tree of groups, and an agreement of ranks that reduce along it."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from hpcaccel.runtime.distributed import wide_groups

from ..checkpoint.world import run_ranks

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("ranks", [2, 5, 16, 17, 100, 4096, 16_384])
def test_every_rank_is_joined_to_rank_0_by_groups_of_bounded_size(ranks):
    widest = 0
    for rank in range(ranks):
        levels = wide_groups.tree_levels(rank, ranks)
        assert levels, rank
        assert all(rank in members and 1 < len(members) <= wide_groups.WIDTH for _, members in levels)
        assert all(members[0] == rank for _, members in levels[:-1])
        first = levels[-1][1][0]
        assert first == 0 or len(wide_groups.tree_levels(first, ranks)) > 1 or first % wide_groups.WIDTH == 0
        assert first < rank or rank == 0
        widest = max(widest, len(levels))
    assert wide_groups.WIDTH ** (widest - 1) < ranks <= wide_groups.WIDTH**widest


def test_connections_are_made_on_demand_in_wide_groups_only(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    wide_groups.connect_on_demand(wide_groups.WIDE)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    wide_groups.connect_on_demand(wide_groups.WIDE + 1)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    wide_groups.connect_on_demand(wide_groups.WIDE + 1)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"


def agreements(rank):
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.training.stop_agreement import BUSY, StopAgreement

    wide_groups.WIDE = 1
    wide_groups.connect_on_demand(2)
    wide_groups.TreeReduction.__init__.__kwdefaults__["width"] = 2
    agreement = StopAgreement(dist.new_group(backend="gloo"))
    found = []
    for step in range(8):
        agreement.issue(stop=rank == step, save=step == 7, saving=BUSY if rank == 4 else 0)
        found.append(agreement.read())
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    tree = wide_groups.TreeReduction(store, rank, dist.get_world_size(), timeout=timedelta(seconds=30), width=2)
    value = torch.tensor([1 << rank, rank])
    tree.start(value, dist.ReduceOp.SUM).wait(timedelta(seconds=30))
    return [(one.stop, one.save, one.saving) for one in found], value.tolist()


def test_ranks_agree_along_a_tree_of_three_levels():
    results = run_ranks(agreements, world_size=5)
    for decisions, value in results:
        assert decisions == [(step < 5, step == 7, 1) for step in range(8)]
        assert value == [31, 10]


def missing(rank):
    import torch
    import torch.distributed as dist

    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    tree = wide_groups.TreeReduction(store, rank, 3, timeout=timedelta(seconds=2), width=2)
    if rank == 2:
        return "absent"
    work = tree.start(torch.tensor([1]), dist.ReduceOp.BOR)
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=30))
    return work.is_completed()


def test_reduction_without_a_rank_fails_after_its_timeout():
    assert run_ranks(missing, world_size=3) == [True, True, "absent"]
