"""Elastic resume: one training on changing numbers of ranks keeps its state and sees each sample once per epoch."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hpcaccel.checkpoint.guarantees import describe_sources, rank_sources
from tests.checkpoint.world import run_ranks

SAMPLES, TOGETHER = 100, 12
"""Size of the dataset, and of a micro-batch over all ranks. Two micro-batches are one step: 5 steps per epoch."""


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


class StatefulStream(Stream):
    place = 0

    def __iter__(self):
        while self.place < SAMPLES:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Turned(Sampler):
    """User-written sampler that draws its own permutation."""

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Buckets(Sampler):
    """Batches of unequal sizes: a position counts batches, not samples."""

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        place = 0
        for number in range(len(self)):
            yield order[place : place + 3 + number % 3]
            place += 3 + number % 3

    def __len__(self) -> int:
        return SAMPLES // 4 + 1


class Net(nn.Module):
    """Tied weights, dropout, a buffer, and sizes that no number of ranks above 1 divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Dropout(0.3), nn.Linear(13, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.embed(tokens)))


LOADERS = {
    "shuffled": lambda size: DataLoader(Numbers(), batch_size=TOGETHER // size, shuffle=True),
    "users generator": lambda size: DataLoader(
        Numbers(), batch_size=TOGETHER // size, shuffle=True, generator=torch.Generator().manual_seed(size)
    ),
    "users sampler": lambda size: DataLoader(Numbers(), batch_size=TOGETHER // size, sampler=Turned()),
    "buckets": lambda size: DataLoader(Numbers(), batch_sampler=Buckets()),
    "stream": lambda size: DataLoader(Stream(), batch_size=TOGETHER // size),
    "stateful stream": lambda size: DataLoader(StatefulStream(), batch_size=TOGETHER // size),
    "stream in a worker": lambda size: DataLoader(Stream(), batch_size=5, num_workers=1),
    "split": lambda size: DataLoader(Numbers(), batch_size=TOGETHER, shuffle=True),
    "dispatched": lambda size: DataLoader(Numbers(), batch_size=TOGETHER // size, shuffle=True),
}


def link(rank: int, size: int, folder: Path, how: str, loader: str, steps: int | None, epochs: int):
    """Resume from the newest checkpoint and train ``steps`` steps or to the end.

    Returns:
        The state's digest and this rank's next random number, at the beginning and at the end, and the samples of all
        ranks with their epochs.
    """
    from hpcaccel import Accelerator
    from hpcaccel.runtime.handlers import DataLoaderConfiguration
    from hpcaccel.runtime.parallelism_config import ParallelismConfig

    torch.manual_seed(size)
    accelerator = Accelerator(
        cpu=True,
        project_dir=str(folder),
        strategy="ddp" if how == "ddp" else "fsdp",
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if how == "hybrid" else None,
        mixed_precision="fp16" if loader == "shuffled" else "no",
        gradient_accumulation_steps=2,
        deterministic=True,
        seed=3,
        dataloader_config=DataLoaderConfiguration(
            split_batches=loader == "split", dispatch_batches=loader == "dispatched"
        ),
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, LOADERS[loader](size))
    accelerator.resume()
    before, seen = (digest(accelerator, model, optimizer, scheduler), torch.rand(1).item()), []
    try:
        for epoch in accelerator.epochs(epochs):
            for numbers in batches:
                with accelerator.accumulate(model):
                    tokens = numbers % 11
                    loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                seen += [(epoch, number) for number in accelerator.gather_for_metrics(numbers).tolist()]
                if steps is not None and accelerator.sync_gradients:
                    steps -= 1
                    if steps == 1 and rank == size - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                accelerator.checkpoint()
    except SystemExit as left:
        assert left.code == 85  # noqa: PT017  # in a process of its own
    after = digest(accelerator, model, optimizer, scheduler), torch.rand(1).item()
    accelerator.end_training()
    return before, after, seen


def digest(accelerator, model, optimizer, scheduler) -> str:
    """Hash of model, optimizer, scheduler and scaler states, independent of how they are sharded."""
    module = accelerator.unwrap_model(model)
    text = hashlib.sha256(repr(sorted(scheduler.scheduler.state_dict().items())).encode())
    text.update(repr(accelerator.scaler and sorted(accelerator.scaler.state_dict().items())).encode())
    state = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        entries = optimizer.state.get(parameter, {})
        state |= {f"{name}:{key}": value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    for name in sorted(state):
        value = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        text.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return text.hexdigest()


def once(epochs: int) -> collections.Counter:
    return collections.Counter((epoch, number) for epoch in range(epochs) for number in range(SAMPLES))


def assert_once(seen, epochs: int, what: str) -> None:
    counts = collections.Counter(seen)
    assert counts == once(epochs), f"{what}: {sorted((counts - once(epochs)) + (once(epochs) - counts))[:20]}"


WAY = [(2, "ddp", 3), (1, "ddp", 3), (3, "fsdp", 3), (4, "hybrid", 3), (2, "fsdp", 2), (2, "ddp", None)]


def test_state_and_samples_survive_changes_of_world_size_and_mesh(tmp_path: Path) -> None:
    """Tied weights, dropout, AdamW, a schedule, an fp16 scaler, accumulation. The newest checkpoint is damaged on the
    way: a different number of ranks falls back to the one before it."""
    logs, ends, seen = [], [], []
    for size, how, steps in WAY:
        results = run_ranks(_with_log, size, tmp_path, how, "shuffled", steps, 3, world_size=size)
        logs.append(results[0][1])
        results = [result for result, _ in results]
        befores, afters = [before for before, _, _ in results], [after for _, after, _ in results]
        if ends:
            assert {state for state, _ in befores} == {ends[-1][0][0]}, how
            for rank, (_, number) in enumerate(befores):
                there = rank < len(ends[-1])
                assert number == (ends[-1][rank][1] if there else _new_number(rank, _step_of(logs[-1]))), (how, rank)
        ends.append(afters)
        seen.append(results[0][2])
        if how == "hybrid":
            newest = max(tmp_path.glob("checkpoints/step_*"))
            _flip_a_byte(newest / "rank_00000.bin")
            ends.pop()
            seen.pop()
    assert_once([item for part in seen for item in part], 3, "shuffled")
    assert "starting at step 0" in logs[0]
    assert "state-exact (world_size: 2 at the save, 1 now)" in logs[1]
    assert "random states: rank 0: own; not used: those of rank 1" in logs[1]
    assert "random states: rank 0: own; ranks 1-2: new (derived from seed, rank and step)" in logs[2]
    assert "random states: ranks 0-2: own; rank 3: new (derived from seed, rank and step)" in logs[3]
    assert "is damaged" in logs[4] or list(tmp_path.glob("checkpoints/quarantined_*"))
    assert "state-exact (mesh: fsdp shard 2 at the save, ddp replicate 2 now)" in logs[5]


def _with_log(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as log:
        result = link(*arguments)
    return result, log.getvalue()


def _step_of(log: str) -> int:
    return int(log.split("resumed at step ")[1].split()[0])


def _new_number(rank: int, step: int) -> float:
    from hpcaccel.runtime.rng.determinism import mix

    return torch.rand(1, generator=torch.Generator().manual_seed(mix(3, rank, step))).item()


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _other_loaders(rank: int, size: int, folder: Path, steps: int | None):
    return {name: link(rank, size, folder / name, "ddp", name, steps, 2) for name in LOADERS if name != "shuffled"}


@pytest.mark.chaos
def test_every_kind_of_loader_yields_each_sample_once_per_epoch(tmp_path: Path) -> None:
    ends: dict[str, str] = {}
    seen = collections.defaultdict(list)
    for size, steps in [(2, 2), (3, 3), (1, None)]:
        for name, (before, after, numbers) in run_ranks(_other_loaders, size, tmp_path, steps, world_size=size)[
            0
        ].items():
            assert before[0] == ends.get(name, before[0]), f"{name} at {size} ranks"
            ends[name] = after[0]
            seen[name] += numbers
    for name, numbers in seen.items():
        assert_once(numbers, 2, name)


@pytest.mark.parametrize(
    ("manifest", "size", "mesh", "expected", "said"),
    [
        ({"world_size": 2}, 2, {}, (0, 1), ""),
        ({"world_size": 2}, 2, {"context": 2}, (0, 0), "rank 0: own; rank 1: from rank 0"),
        ({"world_size": 2, "mesh": {"tensor": 2}}, 2, {"context": 2}, (0, 0), "rank 0: own; rank 1: from rank 0"),
        ({"world_size": 2}, 3, {}, (0, 1, None), "ranks 0-1: own; rank 2: new (derived from seed, rank and step)"),
        ({"world_size": 3}, 2, {}, (0, 1), "ranks 0-1: own; not used: those of rank 2"),
        (
            {"world_size": 4, "mesh": {"tensor": 1}},
            4,
            {"tensor": 2},
            (0, 0, 1, 1),
            "rank 0: own; rank 1: from rank 0; rank 2: from rank 1; rank 3: from rank 1",
        ),
        (
            {"world_size": 4, "mesh": {"tensor": 2}},
            2,
            {"tensor": 1},
            (0, 2),
            "rank 0: own; rank 1: from rank 2; not used: those of ranks 1, 3",
        ),
        (
            {"world_size": 2, "missing_rng": [1]},
            2,
            {},
            (0, None),
            "rank 0: own; rank 1: new (derived from seed, rank and step)",
        ),
    ],
)
def test_rank_sources_maps_saved_random_states_to_the_current_ranks(manifest, size, mesh, expected, said) -> None:
    found = rank_sources(manifest, world_size=size, mesh=mesh)
    assert found == expected
    assert describe_sources(found, world_size=manifest["world_size"]) == said
