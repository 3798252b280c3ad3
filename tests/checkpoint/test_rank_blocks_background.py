"""Background saves and snapshots in memory of several blocks of ranks, on real ranks with blocks of two."""

from __future__ import annotations

import os

import pytest

from hpcaccel.checkpoint import CheckpointEngine, rank_blocks
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.snapshot_index import NodeParts, SnapshotSummary
from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
from hpcaccel.checkpoint_files import snapshot_folder
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.checkpoint_files.verify import verify
from tests.checkpoint.test_rank_blocks import files_in
from tests.checkpoint.test_unchanged_bytes import Run, equal
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.torch

RANKS = 4


# -- background saves --------------------------------------------------------------------------------------------------


def _link(rank, directory):
    rank_blocks.BLOCK = 2
    run = Run(directory, rank=rank, world_size=RANKS, keep=1, local_world_size=RANKS)
    for _ in range(3):
        run.steps()
        run.save()
    run.engine.close()
    again = Run(directory, rank=rank, world_size=RANKS, seed=9)
    loaded = again.engine.load(again.engine.find(), again.state())
    return loaded.step, equal(again.whole(), run.whole()), [(save.bytes, save.written_bytes) for save in run.saved]


def test_unchanged_bytes_are_linked_in_every_block_and_old_checkpoints_deleted(tmp_path):
    found = run_ranks(_link, tmp_path, world_size=RANKS)
    assert [rank[:2] for rank in found] == [(3, True)] * RANKS
    (size, first), *later = found[0][2]
    assert size == first
    assert all(written < first / 5 for _, written in later)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    path = tmp_path / "step_00000003"
    assert {stored for stored in files_in(path) if "base" in stored} == {
        f"block_0000{rank // 2}/rank_0000{rank}.base.bin" for rank in range(RANKS)
    }
    assert all(len(files) <= 2 * 2 + 2 for folder, _, files in os.walk(path) if folder != str(path))
    assert verify(path).good


# -- snapshots ---------------------------------------------------------------------------------------------------------


def _snapshot(rank, shm, run, wrap, block, knows_others):
    """Ranks 0 to 2 on node a, rank 3 on node b; at the resume ranks 0 and 1 on a, 2 and 3 on b."""
    rank_blocks.BLOCK = block
    snapshot_folder.SHARED_MEMORY = shm
    ranks = CheckpointRanks(rank=rank, world_size=RANKS)
    training = Training(wrap, seed=1, rank=rank)
    snapshots = NodeSnapshots(
        ranks, SnapshotFolder(run, "aaab"[rank]), attempt=1, local_world_size=3, is_local_main=rank in (0, 3)
    )
    facts = {"epoch": 0, "reason": "snapshot", "guarantee": "bit-exact", "guarantee_reasons": [], "mesh": {}}
    training.steps(1)
    snapshots.take(training.state(), {**facts, "step": 7, "world_size": RANKS, "attempt": 1})
    before = training.digest(buffers=False)
    engine = CheckpointEngine(run / "checkpoints", rank=rank, world_size=RANKS, attempt=1)
    committed = engine.commit_snapshot(snapshots, "preempted", deadline=None)
    resume = SnapshotResume(ranks, SnapshotFolder(run, "aabb"[rank]), is_local_main=rank in (0, 2))
    found = resume.find(committed=None)
    again = Training(wrap, seed=2, rank=rank)
    if not knows_others:
        NodeParts.others_of = lambda *_: set()
    summaries = []
    original = SnapshotSummary.of
    SnapshotSummary.of = lambda *args, whole: summaries.append(whole) or original(*args, whole=whole)
    loaded = resume.load(found, again.state())
    from_memory = again.digest(buffers=False)
    again = Training(wrap, seed=3, rank=rank)
    again.load(engine)
    return committed, loaded.step, from_memory == before, again.digest(buffers=False) == before, summaries


@pytest.mark.parametrize(
    ("wrap", "block", "knows_others", "summaries"),
    [
        ("ddp", 2, True, [False]),
        ("fsdp", 2, True, [False]),
        ("fsdp", 1, True, [False]),
        ("hsdp", 1, True, [False]),  # the other replica, on another node, has saved some chunks
        ("hsdp", 1, False, [False, True]),
        ("fsdp", 4, True, [True]),  # one block
    ],
)
def test_snapshots_are_loaded_from_memory_and_committed_to_the_disk(tmp_path, wrap, block, knows_others, summaries):
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    found = run_ranks(_snapshot, tmp_path / "shm", tmp_path / "run", wrap, block, knows_others, world_size=RANKS)
    assert found == [(7, 7, True, True, summaries)] * RANKS
    path = tmp_path / "run" / "checkpoints" / "step_00000007"
    assert (path / {1: "block_00003", 2: "block_00001", 4: ""}[block] / "rank_00003.bin").exists()
    assert verify(path).good
