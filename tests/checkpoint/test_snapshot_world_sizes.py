"""Snapshots in memory that another number of ranks loads: on fewer nodes after a loss, and on more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
from hpcaccel.checkpoint_files import snapshot_folder
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.errors import Damaged
from tests.checkpoint.test_damage import flip
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.torch


def take(rank: int, shm: Path, run: Path, wrap: str, nodes: str, replicas: bool) -> list[str]:
    """Take snapshots of steps 1 and 2. Returns the digest of the state at each.

    Args:
        nodes: for each rank, a letter as the name of its node.
    """
    snapshot_folder.SHARED_MEMORY = shm
    training = Training(wrap, seed=1, rank=rank)
    snapshots = NodeSnapshots(
        CheckpointRanks(rank=rank, world_size=len(nodes)), SnapshotFolder(run, nodes[rank]), attempt=1,
        local_world_size=nodes.count(nodes[rank]), is_local_main=nodes.index(nodes[rank]) == rank, replicas=replicas,
    )  # fmt: skip
    facts = {"epoch": 0, "reason": "snapshot", "guarantee": "bit-exact", "guarantee_reasons": [], "mesh": {}}
    digests = []
    for step in (1, 2):
        training.steps(1)
        snapshots.take(training.state(), {**facts, "step": step, "world_size": len(nodes), "attempt": 1})
        digests.append(training.digest(buffers=False))
    snapshots.agree()
    dist.barrier()
    return digests


def resume_of(rank: int, shm: Path, run: Path, nodes: str) -> SnapshotResume:
    snapshot_folder.SHARED_MEMORY = shm
    return SnapshotResume(
        CheckpointRanks(rank=rank, world_size=len(nodes)),
        SnapshotFolder(run, nodes[rank]),
        is_local_main=nodes.index(nodes[rank]) == rank,
    )


def load(rank: int, shm: Path, run: Path, wrap: str, nodes: str) -> tuple[int, str, tuple[str, ...], str] | None:
    """Load the newest snapshot, and train on: step, guarantee, its reasons, digest of the restored state."""
    resume = resume_of(rank, shm, run, nodes)
    found = resume.find(committed=None)
    if found is None:
        return None
    training = Training(wrap, seed=2, rank=rank)
    loaded = resume.load(found, training.state())
    digest = training.digest(buffers=False)
    training.steps(1)
    return loaded.step, loaded.guarantee, loaded.differences, digest


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("before", "after", "replicas"),
    [("abc", "ab", True), ("aabb", "bb", True), ("ab", "abcc", False), ("aab", "ab", False)],
)
def test_snapshot_is_loaded_by_another_number_of_ranks(
    tmp_path: Path, wrap: str, before: str, after: str, replicas: bool
) -> None:
    (tmp_path / "shm").mkdir()
    where = (tmp_path / "shm", tmp_path / "run", wrap)
    digests = run_ranks(take, *where, before, replicas, world_size=len(before))[0]
    why = (f"world_size: {len(before)} at the save, {len(after)} now",)
    answers = run_ranks(load, *where, after, world_size=len(after))
    assert answers == [(2, "state-exact", why, digests[-1])] * len(after)


def test_snapshot_of_which_a_part_was_on_the_lost_node_only_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    where = (tmp_path / "shm", tmp_path / "run", "fsdp")
    run_ranks(take, *where, "abc", False, world_size=3)
    assert run_ranks(load, *where, "ab") == [None, None]


def load_past_damage(rank: int, shm: Path, run: Path, nodes: str) -> tuple[int, str]:
    """The replica of rank 2's newest part has a flipped bit."""
    resume, training = resume_of(rank, shm, run, nodes), Training("fsdp", seed=2, rank=rank)
    if rank == 0:
        file = resume._folder.path / "step_00000002.1.2" / "rank_00002.bin"
        flip(file, 50)
    dist.barrier()
    newest = resume.find(committed=None)
    assert newest is not None
    assert newest.key.step == 2
    with pytest.raises(Damaged, match="rank_00002"):
        resume.load(newest, training.state())
    resume.drop(newest.key)
    older = resume.find(committed=None)
    assert older is not None
    return resume.load(older, training.state()).step, training.digest(buffers=False)


def test_damaged_replica_is_found_by_fewer_ranks_which_load_the_snapshot_before(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    where = (tmp_path / "shm", tmp_path / "run")
    digests = run_ranks(take, *where, "fsdp", "abc", True, world_size=3)[0]
    assert run_ranks(load_past_damage, *where, "ab") == [(1, digests[0])] * 2


def load_without_room(rank: int, shm: Path, run: Path, nodes: str) -> tuple[str, list[str]]:
    """Node b has no memory for the parts that it lacks."""
    resume = resume_of(rank, shm, run, nodes)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        os.posix_fallocate = full
    found = resume.find(committed=None)
    assert found is not None
    with pytest.raises(Damaged) as problem:
        resume.load(found, Training("ddp", seed=2, rank=rank).state())
    resume.drop(found.key)
    left = [path.name for path in resume._folder.path.iterdir() if path.name.startswith("step_00000002")]
    return str(problem.value), left


def test_too_little_memory_for_the_parts_of_others_is_noticed_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    where = (tmp_path / "shm", tmp_path / "run")
    run_ranks(take, *where, "ddp", "abc", True, world_size=3)
    for problem, left in run_ranks(load_without_room, *where, "ab"):
        assert "cannot receive" in problem
        assert "No space left on device (rank 1 on" in problem
        assert left == []
