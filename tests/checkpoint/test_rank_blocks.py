"""Checkpoints of several blocks of ranks, on real ranks with blocks of two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcaccel.checkpoint import CheckpointEngine, rank_blocks
from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import Block, block_of, stored_file
from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
from hpcaccel.checkpoint_files import snapshot_folder
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.checkpoint_files.verify import verify
from tests.checkpoint.test_unchanged_bytes import Run, equal
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.torch

RANKS = 4


def test_files_of_one_block_lie_in_the_checkpoint_itself_and_others_in_folders():
    assert block_of(63, 64) is None
    assert stored_file(63, 64) == "rank_00063.bin"
    assert block_of(63, 65) == Block("block_00000", 64)
    assert block_of(64, 65) == Block("block_00001", 1)
    assert stored_file(64, 65) == "block_00001/rank_00064.bin"


def files_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# -- saves and loads ---------------------------------------------------------------------------------------------------


def _save(rank, directory, wrap):
    rank_blocks.BLOCK = 2
    training = Training(wrap, rank=rank)
    engine = CheckpointEngine(directory, rank=rank, world_size=RANKS)
    for step in (1, 2):
        training.steps(1)
        engine.save(training.state(), step=step)
    return training.digest(buffers=False), {name: value.numpy() for name, value in training.whole().items()}


def _load(rank, directory, wrap, world_size):
    rank_blocks.BLOCK = 2
    training = Training(wrap, seed=5, rank=rank)
    loaded = training.load(CheckpointEngine(directory, rank=rank, world_size=world_size))
    return training.digest(buffers=False), loaded.step


@pytest.fixture(scope="module", params=["fsdp", "ddp", "hsdp"])
def saved(request, tmp_path_factory):
    """Directory with checkpoints of steps 1 and 2, and the digest and the whole state of step 2."""
    directory = tmp_path_factory.mktemp(request.param)
    digest, whole = run_ranks(_save, directory, request.param, world_size=RANKS)[0]
    return directory, digest, whole


def test_each_block_has_a_folder_and_every_byte_is_verified(saved):
    directory, _, _ = saved
    path = directory / "step_00000002"
    assert {"block_00000/rank_00001.bin", "block_00001/rank_00002.bin"} < files_in(path)
    assert not list(path.glob("rank_*"))
    report = verify(path)
    assert (report.problems, report.notes) == ([], [])
    assert report.bytes == sum(file.stat().st_size for file in path.rglob("*.*"))


@pytest.mark.parametrize(("wrap", "world_size"), [("fsdp", 4), ("ddp", 4), ("hsdp", 4), ("fsdp", 3), ("ddp", 2)])
def test_any_number_of_ranks_in_any_layout_loads_it(saved, wrap, world_size):
    directory, digest, _ = saved
    found = run_ranks(_load, directory, wrap, world_size, world_size=world_size)
    assert found == [(digest, 2)] * world_size


def test_one_rank_loads_it(saved):
    directory, digest, _ = saved
    training = Training("plain", seed=5)
    assert training.load(CheckpointEngine(directory)).step == 2
    assert training.digest(buffers=False) == digest


def test_it_is_converted(saved, tmp_path):
    directory, _, whole = saved
    convert(ConvertRequest(str(directory / "step_00000002"), str(tmp_path / "out"), "safetensors"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found
    assert all(torch.equal(value, torch.from_numpy(whole[name])) for name, value in found.items() if "running" not in name)


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
    assert all(len(files) <= 2 * 2 + 1 for folder, _, files in os.walk(path) if folder != str(path))
    assert verify(path).good


# -- snapshots ---------------------------------------------------------------------------------------------------------


def _snapshot(rank, shm, run, wrap):
    """Ranks 0 to 2 on node a, rank 3 on node b; at the resume ranks 0 and 1 on a, 2 and 3 on b."""
    rank_blocks.BLOCK = 2
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
    loaded = resume.load(found, again.state())
    from_memory = again.digest(buffers=False)
    again = Training(wrap, seed=3, rank=rank)
    again.load(engine)
    return committed, loaded.step, from_memory == before, again.digest(buffers=False) == before


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_snapshots_are_loaded_from_memory_and_committed_to_the_disk(tmp_path, wrap):
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    found = run_ranks(_snapshot, tmp_path / "shm", tmp_path / "run", wrap, world_size=RANKS)
    assert found == [(7, 7, True, True)] * RANKS
    path = tmp_path / "run" / "checkpoints" / "step_00000007"
    assert (path / "block_00001" / "rank_00003.bin").exists()
    assert verify(path).good
