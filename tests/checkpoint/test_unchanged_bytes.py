"""Saves that write only what has changed: each checkpoint is complete by itself, whatever happens to the others."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.unchanged_bytes import LEAST_BYTES, Base, KnownFile, Layout, StoredAt, base_file
from hpcaccel.checkpoint.written_file import WrittenFile, complete_index
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.verify import verify
from tests.checkpoint.test_background import message, settle, writer_of
from tests.checkpoint.world import run_ranks

BASE = base_file("rank_00000.bin")


def test_base_file_has_a_name_of_its_own_beside_the_rank_s_file():
    assert BASE == "rank_00000.base.bin"


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

    def __init__(self, directory: Path, *, rank: int = 0, world_size: int = 1, seed: int = 0, **options) -> None:
        torch.manual_seed(seed)
        self.model = Lora()
        if world_size > 1:
            fully_shard(self.model, mesh=torch.distributed.init_device_mesh("cpu", (world_size,)))
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


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_snapshot_finds_the_tensors_that_it_holds_already():
    memory = SnapshotMemory(1 << 22)
    tensors = [torch.arange(5.0), torch.zeros(0), torch.ones(400_000), torch.ones(3), torch.full((300_000,), 2.0)]
    lengths = [-(-one.numel() * 4 // 64) * 64 for one in tensors]
    assert memory.snapshot(tensors, lengths, compare=True) == []
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 2, 3, 4]
    tensors[2][-1], tensors[4][0] = 5, float("nan")
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 3]
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 2, 3, 4]
    tensors[0] = torch.arange(4.0)  # as long in the file, with padding where the last element was
    assert memory.snapshot(tensors, lengths, compare=True) == [1, 2, 3, 4]
    starts = list(accumulate(lengths, initial=0))
    for tensor, start, end in zip(tensors, starts, starts[1:], strict=False):
        raw = tensor.numpy().tobytes()
        assert bytes(memory.view[start:end]) == raw + bytes(end - start - len(raw))
    assert memory.snapshot(tensors, lengths) == []
    memory.forget()
    assert memory.snapshot(tensors, lengths, compare=True) == []


def test_gpu_tensor_that_has_changed_is_not_compared_again():
    memory = SnapshotMemory(1 << 20)
    tensor = torch.arange(100_000.0)
    memory.snapshot([tensor], [400_000])
    assert memory._equals_gpu(tensor, 0, 400_000)
    tensor[-1] = 0
    assert not memory._equals_gpu(tensor, 0, 400_000)
    tensor[-1] = 99_999
    assert not memory._equals_gpu(tensor, 0, 400_000)
    assert memory._equals_gpu(tensor, 0, 400_064)


@pytest.mark.parametrize("seed", range(20))
def test_file_has_every_chunk_at_its_offset_and_its_parts_are_all_of_it(seed):
    dice = random.Random(seed)
    lengths = [64 * dice.choice((0, 1, 3, 63, 64, 65, 1500, 2000)) for _ in range(dice.randrange(1, 30))]
    memory = dice.randbytes(sum(lengths) + 8192)
    in_base = [number for number, length in enumerate(lengths) if length >= LEAST_BYTES and dice.random() < 0.7]
    base = Base(BASE, KnownFile(0, 0, 0, 0), dict.fromkeys(in_base, StoredAt(BASE, 128, 7)))
    layout = Layout(lengths, base)
    file = bytearray(sum(lengths) + 8192 * len(lengths))
    for extent in layout.extents:
        assert extent.start % 4096 == extent.stop % 4096 == extent.offset % 4096 == 0
        file[extent.offset : extent.offset + extent.stop - extent.start] = memory[extent.start : extent.stop]
    del file[layout.size :]
    for number, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        if number not in in_base and length:
            offset = layout.offsets[number]
            assert file[offset : offset + length] == memory[start : start + length]
    assert b"".join(memory[part.start : part.start + part.length] for part in layout.parts()) == bytes(file)
    chunks = [part.chunk for part in layout.parts() if part.chunk is not None]
    assert chunks == [number for number, length in enumerate(lengths) if length and number not in in_base]


def test_index_says_where_each_chunk_is():
    places = ((0, 128), (128, 0), (128, 64))
    chunks = [{"file": "rank_00000.bin", "offset": offset, "stored": stored, "crc32": ""} for offset, stored in places]
    index = json.dumps({"tensors": {"a": {"chunks": chunks}}}).encode()
    base = {"file": BASE, "bytes": 1000, "crc32": 9, "pieces": [0]}
    written = WrittenFile("rank_00000.bin", 64, 5, [1, 0, 2], [128, 0, 64], [512, 0, 0], base)
    found = json.loads(complete_index(index, [written]))["tensors"]["a"]["chunks"]
    assert [(one["file"], one["offset"], one["crc32"]) for one in found] == [
        (BASE, 512, "00000001"),
        ("rank_00000.bin", 0, "00000000"),
        ("rank_00000.bin", 0, "00000002"),
    ]
    assert written.table() == {
        "rank_00000.bin": {"bytes": 64, "crc32": "00000005"},
        BASE: {"bytes": 1000, "crc32": "00000009"},
    }
