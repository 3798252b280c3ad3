"""Checkpoints and snapshots of 80 real ranks, which form two blocks: 64 ranks and 16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint import CheckpointEngine, TrainingState
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.snapshot_index import SnapshotSummary
from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
from hpcaccel.checkpoint_files import snapshot_folder
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.checkpoint_files.verify import verify
from tests.checkpoint.world import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.chaos]

RANKS, RANKS_PER_NODE = 80, 8


class ShardedTraining:
    """A model and AdamW, of which each rank has two rows of each tensor of the first layer and one of the second."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 2 * RANKS), nn.GELU(), nn.Linear(2 * RANKS, RANKS))
        fully_shard(self.model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> TrainingState:
        return TrainingState(models=[self.model], optimizers=[self.optimizer], per_rank={"seed": 1})

    def shards(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *states]
        return [(value.to_local() if isinstance(value, DTensor) else value).detach().clone() for value in tensors]


def everything(rank: int, directory: Path, shm: Path) -> tuple[list[int], list[bool], list[bool]]:
    """The steps of what was loaded, whether the shards were those that were saved, and whether the index was whole."""
    snapshot_folder.SHARED_MEMORY = shm
    ranks = CheckpointRanks(rank=rank, world_size=RANKS)
    is_local_main = rank % RANKS_PER_NODE == 0
    folder = SnapshotFolder(directory, f"n{rank // RANKS_PER_NODE}")
    engine = CheckpointEngine(directory, rank=rank, world_size=RANKS, local_world_size=RANKS)
    snapshots = NodeSnapshots(ranks, folder, attempt=1, local_world_size=RANKS_PER_NODE, is_local_main=is_local_main)
    training, saved = ShardedTraining(1), {}
    for step in (1, 2, 3):
        training.step()
        saved[step] = training.shards()
        if step < 3:
            engine.save(training.state(), step=step, background=step == 2)
    engine.drain()
    facts = {"epoch": 0, "reason": "snapshot", "guarantee": "bit-exact", "guarantee_reasons": [], "mesh": {}}
    snapshots.take(training.state(), {**facts, "step": 3, "world_size": RANKS, "attempt": 1})
    snapshots.agree()

    steps, equal = [], []
    for name in ("step_00000001", "step_00000002"):
        again = ShardedTraining(2)
        steps.append(engine.load(directory / name, again.state()).step)
        equal.append(all(map(torch.equal, again.shards(), saved[steps[-1]])))
    whole: list[bool] = []
    of = SnapshotSummary.of
    SnapshotSummary.of = lambda *args, **words: whole.append(words["whole"]) or of(*args, **words)
    resume, again = SnapshotResume(ranks, folder, is_local_main=is_local_main), ShardedTraining(3)
    found = resume.find(committed=None)
    steps.append(resume.load(found, again.state()).step)
    equal.append(all(map(torch.equal, again.shards(), saved[3])))
    return steps, equal, whole


def test_eighty_ranks_save_and_load_checkpoints_and_snapshots_of_two_blocks(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    answers = run_ranks(everything, tmp_path / "run", tmp_path / "shm", world_size=RANKS)
    assert answers == [([1, 2, 3], [True] * 3, [False])] * RANKS
    for name in ("step_00000001", "step_00000002"):
        path = tmp_path / "run" / name
        assert {folder.name for folder in path.iterdir() if folder.is_dir()} == {"block_00000", "block_00001"}
        assert verify(path).good
