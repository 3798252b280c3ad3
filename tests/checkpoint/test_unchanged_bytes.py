"""Saves that write only what has changed: each checkpoint is complete by itself, whatever happens to the others."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit, node_sharing
from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint.node_sharing import SharedRing
from hpcaccel.checkpoint.stored_file import StoredFile
from hpcaccel.checkpoint.unchanged_bytes import base_file
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.verify import verify
from tests.checkpoint.test_background import message, settle, writer_of
from tests.checkpoint.world import run_ranks

BASE = base_file("rank_00000.bin")


class Lora(nn.Module):
    """A frozen layer of 1.4 MB and two small factors that are trained."""

    def __init__(self, width: int = 600) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Run:
    """A training of ``Lora``, and the engine that saves it."""

    def __init__(
        self, directory: Path, *, rank: int = 0, world_size: int = 1, wrap: str = "fsdp", seed: int = 0, **options
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Lora()
        if world_size > 1 and wrap == "fsdp":
            fully_shard(self.model, mesh=torch.distributed.init_device_mesh("cpu", (world_size,)))
        elif world_size > 1:
            self.model = DistributedDataParallel(self.model)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.saved: list = []
        self.engine = CheckpointEngine(
            directory, rank=rank, world_size=world_size, on_saved=self.saved.append, **options
        )
        self.done = 0

    def state(self) -> TrainingState:
        return TrainingState([self.model], [self.optimizer], per_rank={"done": self.done})

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.done += 1
            x = torch.randn(4, 600, generator=torch.Generator().manual_seed(self.done))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, *, background: bool = True) -> Path:
        path = self.engine.save(self.state(), step=self.done, background=background)
        if background:
            settle(self.engine)
        return path

    def whole(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*self.model.state_dict().values(), *states]
        return [(one.full_tensor() if hasattr(one, "full_tensor") else one).clone() for one in found]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path, keep=1)
    made.steps()
    yield made
    made.engine.close()


# -- a training with frozen parameters ---------------------------------------------------------------------------------


def test_second_save_writes_little_and_resumes_exactly_after_the_first_is_deleted(run, tmp_path):
    first = run.save()
    assert not (first / BASE).exists()
    stored = os.stat(first / "rank_00000.bin")
    run.steps()
    second = run.save()
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    whole, changed = run.saved
    assert whole.written_bytes == whole.bytes
    assert changed.bytes > whole.bytes
    assert changed.written_bytes < whole.bytes / 10
    assert changed.written_bytes == changed.bytes - stored.st_size
    linked = os.stat(second / BASE)
    assert (linked.st_ino, linked.st_nlink, linked.st_size) == (stored.st_ino, 1, stored.st_size)
    assert manifest.read(second)["bytes"] == changed.bytes
    assert sum(file["bytes"] for file in manifest.read(second)["files"].values()) == changed.bytes
    report = verify(second)
    assert report.good, report.problems
    assert report.notes == []
    assert not commit.has_adopted(second)

    run.steps()
    third = run.save()
    assert os.stat(third / BASE).st_ino == stored.st_ino
    copy = tmp_path.parent / f"{tmp_path.name}-copy"
    shutil.copytree(tmp_path, copy)
    expected = run.whole()
    for directory in (tmp_path, copy):
        again = Run(directory, seed=9)
        again.steps(2)
        assert again.engine.load(again.engine.find(), again.state()).step == 3
        assert equal(again.whole(), expected)
    run.steps(3)
    again.done = 3
    again.steps(3)
    assert equal(again.whole(), run.whole())


def _ranks(rank, directory):
    run = Run(directory, rank=rank, world_size=2, keep=1, local_world_size=2)
    for _ in range(3):
        run.steps()
        run.save()
    run.engine.close()
    again = Run(directory, rank=rank, world_size=2, seed=9)
    loaded = again.engine.load(again.engine.find(), again.state())
    return loaded.step, equal(again.whole(), run.whole()), [(save.bytes, save.written_bytes) for save in run.saved]


def test_shards_of_two_ranks_are_linked_and_load_on_any_number_of_ranks(tmp_path):
    first, second = run_ranks(_ranks, tmp_path)
    assert first[:2] == second[:2] == (3, True)
    (bytes_1, written_1), *later = first[2]
    assert bytes_1 == written_1
    assert all(written < bytes_1 / 10 for _, written in later)
    path = tmp_path / "step_00000003"
    assert {f"rank_0000{rank}{ending}" for rank in (0, 1) for ending in (".bin", ".base.bin")} < set(os.listdir(path))
    assert verify(path).good
    alone = Run(tmp_path, seed=5)
    assert alone.engine.load(path, alone.state()).step == 3


def _ddp_ranks(rank, directory):
    node_sharing.LEAST_BYTES = 1
    run = Run(directory, rank=rank, world_size=2, wrap="ddp", keep=1, local_world_size=2)
    for _ in range(3):
        run.steps()
        path = run.save()
    run.engine.close()
    read, shared, parts, blocks, find = [0], [0], StoredFile.parts, StoredFile.read_blocks, SharedRing.find

    def note(self, offset, length, key):
        read[0] += length
        return parts(self, offset, length, key)

    def note_blocks(self, memory, offset, key):
        read[0] += len(memory)
        blocks(self, memory, offset, key)

    def found(self, number):
        shared[0] += 1
        return find(self, number)

    StoredFile.parts, StoredFile.read_blocks, SharedRing.find = note, note_blocks, found
    again = Run(directory, rank=rank, world_size=2, wrap="ddp", seed=9)
    again.steps()
    again.engine.load(path, again.state(), fall_back=False)
    return equal(again.whole(), run.whole()), read[0], shared[0]


def test_ranks_of_a_node_read_a_linked_file_once_together(tmp_path):
    found = run_ranks(_ddp_ranks, tmp_path)
    assert [rank[0] for rank in found] == [True, True]
    path = tmp_path / "step_00000003"
    assert list(path.glob("rank_*.base.bin"))
    assert sum(rank[2] for rank in found) > 0
    assert sum(rank[1] for rank in found) < 1.1 * sum(file.stat().st_size for file in path.glob("rank_*.bin"))


@pytest.mark.parametrize("to", ["safetensors", "torch", "hpcaccel"])
def test_checkpoint_with_a_linked_file_is_converted(run, tmp_path, to):
    run.save()
    run.steps()
    path = run.save()
    assert (path / BASE).exists()
    target = tmp_path.parent / f"{tmp_path.name}-converted"
    convert(ConvertRequest(str(path), str(target), to))
    expected = run.model.state_dict()
    if to == "hpcaccel":
        again = Run(tmp_path.parent / "other", seed=9)
        again.engine.load(target, TrainingState([again.model]), fall_back=False)
        found = again.model.state_dict()
    else:
        found = load_file(target / "model.safetensors") if to == "safetensors" else torch.load(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_everything_is_written_once_more_after_a_restart(run, tmp_path):
    run.save()
    run.engine.close()
    again = Run(tmp_path, seed=9, keep=1)
    again.engine.load(again.engine.find(), again.state())
    again.done = 1
    for _ in range(2):
        again.steps()
        again.save()
    again.engine.close()
    assert [save.written_bytes == save.bytes for save in again.saved] == [True, False]


def _not_linked(run, path):
    assert not (path / BASE).exists()
    assert run.saved[-1].written_bytes == run.saved[-1].bytes
    assert verify(path).good


def test_everything_is_written_if_the_older_checkpoint_was_renamed(run):
    first = run.save()
    first.rename(first.with_name("quarantined_step_00000001"))
    run.steps()
    _not_linked(run, run.save())
    run.steps()
    assert (run.save() / BASE).exists()


def test_everything_is_written_if_another_file_has_the_name_of_the_older_one(run, tmp_path):
    first = run.save() / "rank_00000.bin"
    content = first.read_bytes()
    first.unlink()
    first.write_bytes(bytes(len(content)))
    run.steps()
    _not_linked(run, run.save())
    assert not list(tmp_path.glob(".*"))


def test_everything_is_written_after_a_save_that_blocked(run):
    run.save()
    run.steps()
    run.save(background=False)
    assert run.saved[-1].written_bytes == run.saved[-1].bytes
    run.steps()
    _not_linked(run, run.save())


def test_everything_is_written_after_a_failed_save(run):
    run.save()
    run.steps()
    os.kill(writer_of(run.engine), signal.SIGSTOP)
    run.engine.save(run.state(), step=2, background=True)
    os.kill(writer_of(run.engine), signal.SIGKILL)
    assert "SIGKILL" in message(run.engine.drain)
    _not_linked(run, run.save())


def test_file_is_not_linked_if_less_than_half_of_it_is_unchanged(run):
    run.model.frozen.weight.requires_grad_(True)
    run.optimizer.add_param_group({"params": [run.model.frozen.weight]})
    run.steps()
    run.save()
    run.model.frozen.weight.requires_grad_(False)  # its two moments are as large, and change as little
    state = run.optimizer.state[run.model.frozen.weight]
    for fraction, expected in ((0.4, True), (0.6, False)):
        run.done += 1
        if fraction > 0.5:
            state["exp_avg"].add_(1)
            state["exp_avg_sq"].add_(1)
        assert (run.save() / BASE).exists() is expected


def test_damage_of_a_shared_file_is_found_in_every_checkpoint_that_shares_it(tmp_path):
    run = Run(tmp_path, keep=2)
    for _ in range(3):
        run.steps()
        run.save()
    run.engine.close()
    shared = tmp_path / "step_00000003" / BASE
    assert shared.samefile(tmp_path / "step_00000002" / BASE)
    with shared.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    again = Run(tmp_path, seed=9)
    said = message(lambda: again.engine.load(again.engine.find(), again.state()))
    assert "no intact checkpoint is left" in said
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["quarantined_step_00000002", "quarantined_step_00000003"]


class Values:
    """Tensors of several sizes, of which some change from save to save."""

    SIZES = (0, 1, 17_000, 20_000, 40_000, 3, 33_333, 16_384, 50_000)

    def __init__(self) -> None:
        self.tensors = [torch.zeros(size) for size in self.SIZES]
        self.text = ""

    def state_dict(self):
        return {"text": self.text, "tensors": self.tensors}

    def load_state_dict(self, state):
        self.text, self.tensors = state["text"], state["tensors"]


@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_loads_its_own_values_whatever_changed_in_between(tmp_path, seed):
    dice = random.Random(seed)
    engine = CheckpointEngine(tmp_path, keep=None)
    values, expected = Values(), {}
    for step in range(1, 16):
        values.text = "x" * dice.randrange(200)
        for number in dice.sample(range(len(values.tensors)), dice.choice((0, 1, 2, 5))):
            values.tensors[number] = torch.full_like(values.tensors[number], step)
        engine.save(TrainingState(objects={"values": values}), step=step, background=True)
        expected[step] = values.text, list(values.tensors)
        if dice.random() < 0.1:
            engine.drain()
            shutil.rmtree(tmp_path / checkpoint_files.checkpoint_name(step))
            del expected[step]
    engine.drain()
    engine.close()
    linked = 0
    for step, (text, tensors) in expected.items():
        path = tmp_path / checkpoint_files.checkpoint_name(step)
        linked += (path / BASE).exists()
        loaded = Values()
        engine.load(path, TrainingState(objects={"values": loaded}), fall_back=False)
        assert loaded.text == text
        assert equal(loaded.tensors, tensors)
        assert verify(path).good
    assert linked > 3
