"""Loaders of a script's own, by Accelerate's base classes, and one rank's part of an iterable dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    SkipDataLoader,
)
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.states.gradient_state import GradientState
from tests.runtime.test_data import prepared

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*set_vital")]

GOLDEN = json.loads((Path(__file__).parents[1] / "data/sharding/golden.json").read_text())


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)


class Shuffled(Stream):
    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.samples, generator=self.generator).tolist()


class WithEpoch(Shuffled):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch


# -- IterableDatasetShard ----------------------------------------------------------------------------------------------


def test_shards_have_the_samples_that_accelerate_gives_each_rank() -> None:
    for case, expected in GOLDEN["streams"].items():
        samples, batch_size, size, split, drop_last = map(int, case.split("/"))
        for rank in range(size):
            shard = IterableDatasetShard(Stream(samples), batch_size, bool(drop_last), size, rank, bool(split))
            assert list(shard) == expected[rank], case
            assert len(shard) == len(expected[rank]), case


def test_last_round_of_a_single_process_is_filled_up() -> None:
    assert list(IterableDatasetShard(Stream(5), batch_size=3)) == [0, 1, 2, 3, 4, 0]
    assert list(IterableDatasetShard(Stream(5), batch_size=3, drop_last=True)) == [0, 1, 2]
    assert list(IterableDatasetShard(Stream(1), batch_size=2, num_processes=2, process_index=1)) == [0, 0]


def test_generator_of_the_dataset_is_seeded_with_the_epoch() -> None:
    shards = [IterableDatasetShard(Shuffled(8), 2, num_processes=2, process_index=rank) for rank in (0, 1)]
    first = [list(shard) for shard in shards]
    assert sorted(first[0] + first[1]) == list(range(8))
    assert [list(shard) for shard in shards] == first
    for shard in shards:
        shard.set_epoch(1)
    assert [list(shard) for shard in shards] != first


def test_dataset_that_has_epochs_gets_the_epoch() -> None:
    shard = IterableDatasetShard(WithEpoch(1))
    shard.set_epoch(7)
    assert list(shard) == [7]


def test_shard_is_refused_where_it_would_be_sharded_again_or_not_evenly() -> None:
    with pytest.raises(RuntimeMisuse, match="batch_size=3"):
        IterableDatasetShard(Stream(8), batch_size=3, num_processes=2, split_batches=True)
    shard = IterableDatasetShard(Stream(8), batch_size=2, num_processes=2)
    with pytest.raises(RuntimeMisuse, match="shard the data a second time"):
        prepared(DataLoader(shard, batch_size=2), size=2)
    assert [batch.tolist() for batch in prepared(DataLoader(shard, batch_size=2))] == [[0, 1], [4, 5]]


# -- loaders of a script's own -----------------------------------------------------------------------------------------


def test_adapter_is_a_loader_with_the_attributes_of_the_one_inside() -> None:
    adapter = DataLoaderAdapter(range(5), batch_size=2, num_workers=0)
    assert isinstance(adapter, DataLoader)
    assert (len(adapter), adapter.batch_size, adapter.base_dataloader.dataset) == (3, 2, range(5))
    assert [batch.tolist() for batch in adapter] == [[0, 1], [2, 3], [4]]
    assert [batch.tolist() for batch in prepared(adapter, rank=1, size=2)] == [[2, 3], [1, 2]]
    assert not hasattr(adapter, "state_dict")
    with pytest.raises(AttributeError, match="absent"):
        adapter.absent  # noqa: B018


def test_stateful_adapter_continues_at_its_state() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    adapter = DataLoaderAdapter(range(6), use_stateful_dataloader=True, batch_size=2)
    next(iter(adapter))
    state = adapter.state_dict()
    again = DataLoaderAdapter(range(6), use_stateful_dataloader=True, batch_size=2)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]


def test_prepared_loaders_are_instances_of_the_base_classes() -> None:
    loader = prepared(DataLoader(range(5), batch_size=2), size=2)
    assert isinstance(loader, DataLoaderAdapter)
    assert isinstance(loader, DataLoaderStateMixin)
    assert (loader.total_batch_size, loader.end_of_dataloader, loader.remainder) == (4, False, 1)
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        assert issubclass(kind, DataLoaderStateMixin)
    assert not isinstance(DataLoader(range(5)), DataLoaderAdapter)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(cpu=True, gradient_accumulation_steps=4)
    yield made
    made.end_training()


@pytest.mark.parametrize("data", [range(10), Stream(10)], ids=["map-style", "stream"])
def test_skipping_loader_ends_an_accumulation_at_its_last_batch(accelerator: Accelerator, data: Any) -> None:
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = SkipDataLoader(data, skip_batches=2, batch_size=2)
    state, found, steps = GradientState(), [], []
    assert state.active_dataloader is None
    for batch in loader:
        found.append(batch.tolist())
        assert state.active_dataloader is loader
        assert state.dataloader_references == [None, loader]
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
    assert found == [[4, 5], [6, 7], [8, 9]]
    assert (steps, len(loader)) == ([False, False, True], 3)
    assert (state.in_dataloader, state.end_of_dataloader) == (False, False)


def test_skipping_loader_that_is_left_early_is_no_longer_active(accelerator: Accelerator) -> None:
    inner = SkipDataLoader(range(4))
    outer = accelerator.prepare(DataLoader(range(4)))
    for _ in outer:
        for _ in inner:
            assert GradientState().active_dataloader is inner
            break
        assert GradientState().active_dataloader is outer


class Own(DataLoaderStateMixin):
    """A loader by hand, whose last batch is incomplete."""

    _drop_last = False
    total_batch_size = 4
    dataset = range(6)

    def __init__(self) -> None:
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[int]:
        self.begin()
        for number in range(2):
            self.end_of_dataloader = number == 1
            yield number
        self.end()


def test_own_loader_of_the_mixin_is_the_active_one(accelerator: Accelerator) -> None:
    loader, state = Own(), GradientState()
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)
    seen = [(state.active_dataloader is loader, state.end_of_dataloader, state.remainder) for _ in loader]
    assert seen == [(True, False, 2), (True, True, 2)]
    assert state.remainder == -1
    loader.reset()
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)


def test_training_with_an_own_loader_counts_its_steps(accelerator: Accelerator) -> None:
    """Such a loader does not report the end of a step, so that the next backward pass does."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in SkipDataLoader(torch.ones(6, 1), batch_size=2):
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert accelerator.step == 3
