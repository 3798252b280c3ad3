"""Groups of many ranks: the tree of groups, and an agreement of ranks that reduce along it."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

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
    wide_groups.RankTree.__init__.__kwdefaults__["width"] = 2
    agreement = StopAgreement(dist.new_group(backend="gloo"))
    found = []
    for step in range(8):
        agreement.issue(stop=rank == step, save=step == 7, saving=BUSY if rank == 4 else 0)
        found.append(agreement.read())
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    tree = wide_groups.RankTree(store, rank, dist.get_world_size(), timeout=timedelta(seconds=30), width=2)
    value = torch.tensor([1 << rank, rank])
    tree.reduce(value, dist.ReduceOp.SUM).wait(timedelta(seconds=30))
    return [(one.stop, one.save, one.saving) for one in found], value.tolist()


def test_ranks_agree_along_a_tree_of_three_levels():
    results = run_ranks(agreements, world_size=5)
    for decisions, value in results:
        assert decisions == [(step < 5, step == 7, 1) for step in range(8)]
        assert value == [31, 10]


def tables(rank):
    import torch
    import torch.distributed as dist

    ranks, found = dist.get_world_size(), []
    for width in (2, 3, 16):
        store = dist.PrefixStore(f"mine/{width}", dist.distributed_c10d._get_default_store())
        tree = wide_groups.RankTree(store, rank, ranks, timeout=timedelta(seconds=30), width=width)
        table = torch.full((tree.rows, 2), -1)
        for turn in range(3):
            table[rank] = torch.tensor([rank, turn])
            tree.gather(table).wait(timedelta(seconds=30))
            found.append(table[:ranks].tolist() == [[each, turn] for each in range(ranks)])
    return found


@pytest.mark.parametrize("ranks", [2, 5, 7])
def test_every_rank_gets_the_rows_of_all_ranks_along_the_tree(ranks):
    assert run_ranks(tables, world_size=ranks) == [[True] * 9] * ranks


def exchanged(rank):
    import torch
    import torch.distributed as dist

    from hpcaccel.errors import DistributedOperationException
    from hpcaccel.runtime.distributed.collectives import exchange as module
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog

    wide_groups.WIDE = 1
    wide_groups.RankTree.__init__.__kwdefaults__["width"] = 2
    ranks, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    watchdog = CollectiveWatchdog(
        rank=rank, world_size=ranks, store=dist.PrefixStore("status", store), timeout_seconds=60.0
    )
    calls = module.Exchange(dist.new_group(backend="gloo"), watchdog)
    ring = []
    gather = calls.group.allgather
    calls.group = SimpleNamespace(allgather=lambda *words: ring.append(1) or gather(*words))
    values = calls.call("a", value=rank).values
    texts = [calls.objects_from_all("x" * size * rank, what="b") for size in (1, 400)]
    small = len(ring)
    large = calls.call("c", data=torch.full((5000,), rank, dtype=torch.uint8))
    with pytest.raises(DistributedOperationException) as failed:
        calls.call("d" if rank else "e")
    same = [len(each) for each in texts[1]]
    return values, texts[0], same, small, len(ring), large.table[:, -1].tolist(), str(failed.value).splitlines()[1]


def test_calls_of_many_ranks_go_along_the_tree_and_large_data_along_the_ring():
    for found in run_ranks(exchanged, world_size=5):
        values, texts, lengths, small, all_calls, last, difference = found
        assert values == last == [0, 1, 2, 3, 4]
        assert texts == ["x" * rank for rank in range(5)]
        assert lengths == [400 * rank for rank in range(5)]
        assert (small, all_calls) == (0, 1)
        assert difference.strip().startswith("rank 0: e at ")


def missing(rank):
    import torch
    import torch.distributed as dist

    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    tree = wide_groups.RankTree(store, rank, 3, timeout=timedelta(seconds=2), width=2)
    if rank == 2:
        return "absent"
    work = tree.reduce(torch.tensor([1]), dist.ReduceOp.BOR)
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=30))
    return work.is_completed()


def test_reduction_without_a_rank_fails_after_its_timeout():
    assert run_ranks(missing, world_size=3) == [True, True, "absent"]
