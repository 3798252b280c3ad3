"""Groups of many ranks: the tree of groups, and an agreement of ranks that reduce along it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
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


STORE_OF_MANY = """
import resource, sys
from datetime import timedelta
from types import SimpleNamespace
from hpcaccel.runtime.distributed import rendezvous
files, ranks = 64, 100
resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
env = SimpleNamespace(rank=0, world_size=ranks, ports=(), master_addr="127.0.0.1", master_port=0)
store = rendezvous._make(env, "env://", timedelta(seconds=30))
others = [rendezvous._tcp_store("127.0.0.1", store.port, timedelta(seconds=30), serves=False) for _ in range(ranks)]
print([other.add("n", 1) for other in others][-1], resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_store_of_many_ranks_may_open_a_connection_to_each():
    done = subprocess.run([sys.executable, "-c", STORE_OF_MANY], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout.split() == ["100", str(100 + wide_groups.OTHER_FILES)]


def test_limit_of_open_files_is_never_lowered_and_not_above_the_hard_limit(monkeypatch):
    limits, changed = [4096, 8192], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: changed.append(new))
    wide_groups.allow_connections(1024)
    assert changed == []
    wide_groups.allow_connections(16_384)
    limits[1] = resource.RLIM_INFINITY
    wide_groups.allow_connections(16_384)
    assert changed == [(8192, 8192), (16_384 + wide_groups.OTHER_FILES, resource.RLIM_INFINITY)]


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


def headers_first(rank):
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.collectives import exchange as module
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog

    wide_groups.WIDE = 1
    wide_groups.RankTree.__init__.__kwdefaults__["width"] = 2
    ranks, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    watchdog = CollectiveWatchdog(
        rank=rank, world_size=ranks, store=dist.PrefixStore("status", store), timeout_seconds=60.0
    )
    calls = module.Exchange(dist.new_group(backend="gloo"), watchdog)
    gathered = []
    gather = calls._tree.gather
    calls._tree.gather = lambda table: gathered.append(table.shape[1] * table.element_size()) or gather(table)

    def during(call):
        gathered.clear()
        return call(), list(gathered)

    def outcome(call):
        try:
            return call().values
        except module.ExchangeInterrupted as error:
            return str(error).partition(" at ")[0]

    lowest = -(2**63)
    return [
        during(lambda: calls.call("wait_for_everyone").values),
        during(lambda: calls.call("max", value=lowest).values),
        during(lambda: calls.call("gather", data=torch.full((8,), rank, dtype=torch.uint8)).table.tolist()),
        during(lambda: calls.object_from(3, "from 3" if rank == 3 else None, what="broadcast")),
        during(lambda: calls.object_from(3, "x" * 5000 if rank == 3 else None, what="broadcast")[-1]),
        during(lambda: bytes(calls.call("none", source=1).data(1).tolist())),
        during(lambda: calls.call("max", value=rank).values),
        during(lambda: outcome(lambda: calls.call("memory", interrupts=rank == 2))),
        during(lambda: calls.call("memory", interrupts=True).values),
    ]


def test_equal_calls_of_many_ranks_send_no_table_of_all_headers():
    """A table has a row for each rank: its bytes would grow with the number of ranks."""
    ranks = 5
    for rank, found in enumerate(run_ranks(headers_first, world_size=ranks)):
        assert found == [
            ([0] * ranks, []),
            ([-(2**63)] * ranks, []),
            ([[each] * 8 for each in range(ranks)], [8]),
            ("from 3", []),
            ("x", []),
            (b"", []),
            (list(range(ranks)), [256]),
            ([0] * ranks if rank == 2 else "rank 2 aborted memory", [256]),
            ([0] * ranks, []),
        ]


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
