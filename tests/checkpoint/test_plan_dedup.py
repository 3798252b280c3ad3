"""Which rank writes a chunk that several ranks have."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpcaccel.checkpoint import object_tree, save_plan
from hpcaccel.checkpoint.plan_dedup import Coverage, _Part
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.save_content import SaveContent
from hpcaccel.checkpoint.save_plan import PlanCache
from hpcaccel.errors import CheckpointError

from .world import run_ranks

pytestmark = pytest.mark.torch


def planned(rank, content, *, counts=None):
    """What this rank writes, how many ranks write anything, and whether rank 0 planned for all."""
    globally = []
    plan_globally = save_plan._plan_globally
    save_plan._plan_globally = lambda *args: globally.append(1) or plan_globally(*args)
    begun = []
    ranks = CheckpointRanks(rank=rank, world_size=dist.get_world_size())
    plan, _ = PlanCache().plan(ranks, what="no", collect=lambda: content, begin=lambda: begun.append(1))
    assert begun == ([1] if rank == 0 else [])
    return [(chunk[0], chunk[3], chunk[5]) for chunk in json.loads(plan.chunks)], plan.files, bool(globally)


def hybrid(rank):
    """Two replicas of four tensors of different sizes, each split over two ranks, and one tensor on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sizes = {"a": 6, "b": 4, "c": 2, "d": 1000}
    split = {key: distribute_tensor(torch.ones(n, 2), mesh, [Replicate(), Shard(0)]) for key, n in sizes.items()}
    tensors = {**split, "whole": torch.ones(3), f"rank.{rank}.own": torch.ones(5)}
    return planned(rank, SaveContent(tensors, frozenset({"whole"})))


def test_each_chunk_of_hybrid_sharding_is_written_by_one_of_its_replicas():
    results = run_ranks(hybrid, world_size=4)
    assert [(files, globally) for _, files, globally in results] == [(4, False)] * 4
    written = [chunk for chunks, *_ in results for chunk in chunks]
    assert sorted(chunk for chunk in written if chunk[0] in "abcd") == sorted(
        (key, [at, 0], half * 8)
        for key, half in {"a": 3, "b": 2, "c": 1, "d": 500}.items()
        for at in (0, half)
    )  # fmt: skip
    assert [key for key, *_ in written].count("whole") == 1
    for rank, (chunks, *_) in enumerate(results):
        assert [key for key, *_ in chunks if key.startswith("rank.")] == [f"rank.{rank}.own"]
        large = [key for key, *_ in chunks if key in "abcd"]
        assert large in (["d"], ["a", "b", "c"])  # about as many bytes at each replica as is possible


def replicated(rank):
    tensors = {f"layer.{number}": torch.ones(100 + number) for number in range(30)}
    extra = {"only": torch.ones(7)} if rank == 0 else {}
    return planned(rank, SaveContent({**tensors, **extra}, frozenset(tensors)))


def test_ranks_that_all_have_a_tensor_write_about_as_many_bytes_each():
    results = run_ranks(replicated, world_size=3)
    written = sorted(key for chunks, *_ in results for key, *_ in chunks)
    assert written == sorted(["only", *(f"layer.{number}" for number in range(30))])
    sizes = [sum(length for *_, length in chunks) for chunks, *_ in results]
    assert max(sizes) - min(sizes) < 2 * 4 * 130
    assert "only" in [key for key, *_ in results[0][0]]
    assert not any(globally for *_, globally in results)


def one_mesh_per_replica(rank):
    """A mesh over two of the four ranks: a rank does not know of the other replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    return planned(rank, SaveContent({"x": distribute_tensor(torch.ones(8), mesh, [Shard(0)])}))


def test_replicas_on_different_meshes_are_planned_on_rank_0():
    results = run_ranks(one_mesh_per_replica, world_size=4)
    assert all(globally for *_, globally in results)
    assert sorted(chunk for chunks, *_ in results for chunk in chunks) == [("x", [0], 16), ("x", [4], 16)]
    assert results[0][1] == 2


def differing(rank):
    """The rank that is to write a tensor does not have it; then nobody has half of another one."""
    all_of_it = {"x": torch.ones(4), "y": torch.ones(4)}
    had = all_of_it if rank == 0 else {"x": all_of_it["x"]}
    found = planned(rank, SaveContent(had, frozenset(all_of_it)))
    mesh = init_device_mesh("cpu", (2,))
    split = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    half = SaveContent({"z": split} if rank == 0 else {})
    ranks = CheckpointRanks(rank=rank, world_size=2)
    with pytest.raises(CheckpointError) as caught:
        PlanCache().plan(ranks, what="no", collect=lambda: half, begin=list)
    return found, str(caught.value)


def test_tensor_that_its_writer_lacks_is_planned_on_rank_0_and_one_with_a_gap_is_refused():
    results = run_ranks(differing)
    assert all(globally for (_, _, globally), _ in results)
    assert sorted(key for (chunks, *_), _ in results for key, *_ in chunks) == ["x", "y"]
    messages = {message for _, message in results}
    assert len(messages) == 1
    assert messages.pop().startswith("no: ")


def lacking(rank):
    """Ranks of both replicas lack a tensor, so that they would disagree on who writes the others: each half of ``b``
    twice and never, though their sum is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensors = {
        key: distribute_tensor(torch.ones(n), mesh, [Replicate(), Shard(0)]) for key, n in {"a": 8, "b": 4}.items()
    }
    if rank in (0, 3):
        del tensors["a"]
    return planned(rank, SaveContent(tensors))


def test_ranks_that_lack_a_tensor_are_noticed():
    coverage = [Coverage(1, {"b": part(holders=1, elements=2, chunks=1)}) for _ in range(2)]
    assert coverage[0].joined(coverage[1]).is_complete
    assert (coverage[0].wide(1), coverage[0].wide(2)) == ({"b"}, set())
    assert not Coverage(1, {"b": part(holders=1, elements=4, chunks=1)}).is_complete
    results = run_ranks(lacking, world_size=4)
    assert all(globally for *_, globally in results)
    halves = [("a", [0], 16), ("a", [4], 16), ("b", [0], 8), ("b", [2], 8)]
    assert sorted(chunk for chunks, *_ in results for chunk in chunks) == halves


def part(**found):
    return _Part(torch.float32, (4,), "mesh", 2, **found)


def largest_message(rank):
    """Bytes of the largest message that this rank sends for a new plan of 20 tensors."""
    sizes = [0]
    send = object_tree._send
    object_tree._send = lambda value, *args: (sizes.append(len(pickle.dumps(value))), send(value, *args))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {f"layer.{n}": distribute_tensor(torch.ones(64, 2), mesh, [Shard(0)]) for n in range(20)}
    assert not planned(rank, SaveContent(tensors))[2]
    return max(sizes)


def test_messages_of_a_new_plan_do_not_grow_with_the_number_of_ranks():
    few, many = (max(run_ranks(largest_message, world_size=size)) for size in (2, 8))
    assert many <= few + 16
