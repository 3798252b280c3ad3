"""Prepared loaders: epochs, places in the middle of one, and what the user's own loader was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hpcaccel.runtime.accumulation import Accumulation
from hpcaccel.runtime.data import PreparedLoader
from hpcaccel.runtime.env import RankEnvironment
from hpcaccel.runtime.process_group import Group


class Hooks:
    """A training loop that is asked and told."""

    finishing = False
    restored = 0
    asked = 0

    def step_is_over(self) -> None:
        self.asked += 1

    def restore_rng(self) -> None:
        self.restored += 1


def group(rank: int = 0, size: int = 1) -> Group:
    env = RankEnvironment(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="",
        master_port=0,
        source="torchrun",
    )
    return Group(env, torch.device("cpu"), None)


def prepared(loader: DataLoader[Any], *, rank: int = 0, size: int = 1, hooks: Hooks | None = None) -> PreparedLoader:
    return PreparedLoader(loader, group=group(rank, size), accumulation=Accumulation(1), hooks=hooks or Hooks(), seed=3)


def shuffled(samples: int = 22, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2, shuffle=True, **options)


def values(loader: PreparedLoader, count: int | None = None) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch[0].tolist())
        if len(found) == count:
            break
    return found


def test_it_is_a_dataloader_with_the_users_own_attributes() -> None:
    user = shuffled()
    loader = prepared(user, size=2)
    assert isinstance(loader, DataLoader)
    assert (loader.dataset, loader.batch_size, loader.num_workers) == (user.dataset, 2, 0)
    assert len(loader) == 6
    assert len(values(loader)) == 6


def test_every_epoch_has_an_order_of_its_own_also_after_a_break() -> None:
    whole = prepared(shuffled())
    first, second, third = values(whole), values(whole), values(whole)
    broken = prepared(shuffled())
    assert values(broken, 4) == first[:4]
    assert values(broken, 1) == second[:1]
    assert values(broken) == third


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(workers: int, own_generator: bool) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(8) if own_generator else None
        return shuffled(num_workers=workers, generator=generator)

    undisturbed = prepared(make())
    epochs = [values(undisturbed) for _ in range(3)]

    stopped = prepared(make())
    values(stopped)
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    state = stopped.state_dict()
    hooks = Hooks()
    resumed = prepared(make(), hooks=hooks)
    resumed.load_state_dict(state)
    assert values(resumed) == epochs[1][4:]
    assert values(resumed) == epochs[2]
    assert hooks.restored == 1


def test_a_place_saved_between_epochs_leads_to_the_next_one() -> None:
    undisturbed = prepared(shuffled())
    second = [values(undisturbed) for _ in range(2)][1]
    stopped = prepared(shuffled())
    values(stopped)
    resumed = prepared(shuffled())
    resumed.load_state_dict(stopped.state_dict())
    assert values(resumed) == second


def test_an_epoch_whose_batches_are_all_used_is_empty_when_it_is_taken_up() -> None:
    stopped = prepared(shuffled())
    batches = iter(stopped)
    for _ in range(11):
        next(batches)
    resumed = prepared(shuffled())
    resumed.load_state_dict(stopped.state_dict())
    assert values(resumed) == []
    assert len(values(resumed)) == 11


def test_a_place_means_the_same_to_another_number_of_ranks() -> None:
    stopped = [prepared(shuffled(24), rank=rank, size=2) for rank in range(2)]
    seen = [sample for loader in stopped for batch in values(loader, 3) for sample in batch]
    running = [prepared(shuffled(24), rank=rank, size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in running]
    for _ in range(3):
        for iterator in iterators:
            next(iterator)
    resumed = [prepared(shuffled(24), rank=rank, size=3) for rank in range(3)]
    for loader in resumed:
        loader.load_state_dict(running[0].state_dict())
    seen += [sample for loader in resumed for batch in values(loader) for sample in batch]
    assert sorted(seen) == list(range(24))


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), float(torch.rand(()))


def test_random_augmentation_in_workers_is_the_same_after_a_resume() -> None:
    def make() -> PreparedLoader:
        return prepared(DataLoader(Augmented(), batch_size=2, num_workers=2))

    whole = [[part.tolist() for part in batch] for batch in make()]
    assert whole[0][1] != whole[1][1]
    stopped = make()
    batches = iter(stopped)
    for _ in range(3):
        next(batches)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [[part.tolist() for part in batch] for batch in resumed] == whole[3:]


def test_iterating_leaves_the_global_generators_alone() -> None:
    loader = prepared(shuffled())
    before = torch.get_rng_state()
    values(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_persistent_workers_serve_every_epoch() -> None:
    kept = prepared(shuffled(num_workers=1, persistent_workers=True))
    fresh = prepared(shuffled())
    assert [values(kept) for _ in range(3)] == [values(fresh) for _ in range(3)]


def test_single_samples_without_batching_are_shared_out() -> None:
    loaders = [
        prepared(DataLoader(TensorDataset(torch.arange(6)), batch_size=None), rank=rank, size=2) for rank in range(2)
    ]
    assert [[int(item[0]) for item in loader] for loader in loaders] == [[0, 2, 4], [1, 3, 5]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


def test_a_stream_is_shared_out_and_fast_forwarded_with_a_warning() -> None:
    def make(rank: int) -> PreparedLoader:
        return prepared(DataLoader(Stream(), batch_size=2), rank=rank, size=2)

    whole = [[batch.tolist() for batch in make(rank)] for rank in range(2)]
    assert whole == [[[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [0, 1]]]
    stopped = make(1)
    batches = iter(stopped)
    next(batches)
    resumed = make(1)
    resumed.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="2 batches are read and thrown away"):
        assert [batch.tolist() for batch in resumed] == whole[1][1:]


def test_the_last_batch_is_known_as_such() -> None:
    loader = prepared(shuffled(5))
    assert [loader.at_last_batch for _ in loader] == [False, False, True]


def test_a_training_that_is_to_finish_ends_its_loader_and_no_other() -> None:
    hooks = Hooks()
    training, evaluation = prepared(shuffled(), hooks=hooks), prepared(shuffled(), hooks=hooks)
    training.trains = True
    count = 0
    for _ in training:
        count += 1
        if count == 3:
            hooks.finishing = True
            assert len(values(evaluation)) == 11
    assert count == 3
    assert training.state_dict()["running"]
