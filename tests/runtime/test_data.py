"""Prepared loaders: epochs, positions within an epoch, and the attributes of the user's loader."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.standalone import prepare_data_loader
from hpcaccel.runtime.data.batch_samplers import BatchSamplerShard, SeedableRandomSampler, skip_first_batches
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.distributed.collectives.nested_ops import to_device
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.distributed.world import World
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


class Hooks:
    """A training loop that counts calls of its hooks."""

    finishing = False
    finished_epochs_are_over = False
    step = 0
    restored = 0
    asked = 0

    def step_is_over(self) -> None:
        self.asked += 1

    def restore_rng(self) -> None:
        self.restored += 1

    def loop_is_entered(self) -> None:
        pass

    def loop_is_left(self) -> None:
        pass


def group(rank: int = 0, size: int = 1) -> RankGroup:
    env = RankEnvironment(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="",
        master_port=0,
        source="torchrun",
    )
    return RankGroup(env, torch.device("cpu"), None)


def prepared(
    loader: DataLoader[Any], *, rank: int = 0, size: int = 1, hooks: Hooks | None = None, **options: Any
) -> PreparedLoader:
    given: dict[str, Any] = {"in_use": LoadersInUse(), "seed": 3, "dispatch_batches": False} | options
    return PreparedLoader(loader, group=group(rank, size), hooks=hooks or Hooks(), **given)


def shuffled(samples: int = 22, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2, shuffle=True, **options)


def values(loader: DataLoader[Any], count: int | None = None) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch[0].tolist())
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [1, 7, 8, 9])
def test_batch_sampler_of_a_rank_yields_the_batches_that_its_loader_reads(
    samples: int, drop_last: bool, even: bool, split: bool
) -> None:
    for rank in range(2):
        user = DataLoader(TensorDataset(torch.arange(samples)), batch_size=2, drop_last=drop_last)
        loader = prepared(user, rank=rank, size=2, even_batches=even, split_batches=split)
        assert loader.batch_sampler.batch_sampler is user.batch_sampler
        alone = BatchSamplerShard(user.batch_sampler, 2, rank, split_batches=split, even_batches=even)
        expected = values(loader)
        assert list(loader.batch_sampler) == list(alone) == expected
        assert len(loader.batch_sampler) == len(alone) == len(expected)


def test_even_batches_can_be_set_through_the_batch_sampler() -> None:
    loader = prepared(DataLoader(TensorDataset(torch.arange(3))), rank=1, size=2)
    assert (loader.batch_sampler.even_batches, len(loader)) == (True, 2)
    loader.batch_sampler.even_batches = False
    assert (loader.even_batches, len(loader)) == (False, 1)


@pytest.mark.parametrize("seedable", [False, True])
def test_epoch_can_be_set_through_the_batch_sampler(seedable: bool) -> None:
    loader, other = (prepared(shuffled(), rank=1, size=2, seedable=seedable) for _ in range(2))
    shown = loader.batch_sampler
    shown.set_epoch(7)
    other.set_epoch(7)
    assert loader.iteration == 7
    assert values(loader) == values(other)


def test_prepare_data_loader_reads_another_ranks_part_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_current", None)

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    def part(size: int, rank: int, **options: Any) -> list[list[int]]:
        loader = DataLoader(Stream(), batch_size=2)
        found = prepare_data_loader(loader, num_processes=size, process_index=rank, put_on_device=True, **options)
        return [batch.tolist() for batch in found]

    with pytest.raises(RuntimeMisuse, match=r"num_processes=2, process_index=1\).*Pass dispatch_batches=False"):
        part(2, 1)
    assert part(2, 1, dispatch_batches=False) == [[2, 3], [6, 7]]
    assert part(1, 0) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_single_rank_keeps_the_users_batch_sampler() -> None:
    user = shuffled()
    assert prepared(user).batch_sampler is user.batch_sampler


def test_seedable_order_is_that_of_the_exposed_sampler() -> None:
    loader = prepared(shuffled(), rank=0, size=2, seedable=True)
    shown = loader.batch_sampler.batch_sampler
    assert isinstance(shown.sampler, SeedableRandomSampler)
    expected = [batch for number, batch in enumerate(shown) if number % 2 == 0]
    assert values(loader)[:-1] == expected[:-1]


def test_prepared_loader_is_a_dataloader_with_the_users_attributes() -> None:
    user = shuffled()
    loader = prepared(user, size=2)
    assert isinstance(loader, DataLoader)
    assert (loader.dataset, loader.batch_size, loader.num_workers) == (user.dataset, 2, 0)
    assert len(loader) == 6
    assert len(values(loader)) == 6


def test_order_of_an_epoch_does_not_depend_on_breaks_in_earlier_epochs() -> None:
    whole = prepared(shuffled())
    first, second, third = values(whole), values(whole), values(whole)
    broken = prepared(shuffled())
    assert values(broken, 4) == first[:4]
    assert values(broken, 1) == second[:1]
    assert values(broken) == third


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_loader_resumes_in_the_middle_of_an_epoch(workers: int, own_generator: bool) -> None:
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


def test_position_saved_between_epochs_resumes_with_the_next_epoch() -> None:
    undisturbed = prepared(shuffled())
    second = [values(undisturbed) for _ in range(2)][1]
    stopped = prepared(shuffled())
    values(stopped)
    resumed = prepared(shuffled())
    resumed.load_state_dict(stopped.state_dict())
    assert values(resumed) == second


def test_resumed_epoch_is_empty_if_all_its_batches_were_used() -> None:
    stopped = prepared(shuffled())
    batches = iter(stopped)
    for _ in range(11):
        next(batches)
    resumed = prepared(shuffled())
    resumed.load_state_dict(stopped.state_dict())
    assert values(resumed) == []
    assert len(values(resumed)) == 11


def test_resume_with_another_number_of_ranks_reads_each_sample_once() -> None:
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


def test_iteration_does_not_change_torchs_global_generator() -> None:
    loader = prepared(shuffled())
    before = torch.get_rng_state()
    values(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_persistent_workers_read_the_same_epochs_as_no_workers() -> None:
    kept = prepared(shuffled(num_workers=1, persistent_workers=True))
    fresh = prepared(shuffled())
    assert [values(kept) for _ in range(3)] == [values(fresh) for _ in range(3)]


def test_samples_without_batching_are_divided_among_ranks() -> None:
    loaders = [
        prepared(DataLoader(TensorDataset(torch.arange(6)), batch_size=None), rank=rank, size=2) for rank in range(2)
    ]
    assert [[int(item[0]) for item in loader] for loader in loaders] == [[0, 2, 4], [1, 3, 5]]


def test_at_last_batch_is_true_only_at_the_last_batch() -> None:
    loader = prepared(shuffled(5))
    assert [loader.at_last_batch for _ in loader] == [False, False, True]


def test_finishing_training_ends_only_the_training_loader() -> None:
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


def test_abandoned_iteration_closed_late_does_not_affect_the_next_one() -> None:
    in_use = LoadersInUse()
    loader = prepared(shuffled(), in_use=in_use)
    held = iter(loader)
    next(held)
    running = iter(loader)
    next(running)
    held.close()  # type: ignore[attr-defined]
    assert in_use.current is loader
    assert loader.state_dict()["running"]
    assert loader.state_dict()["epoch"] == 1


def test_abandoned_evaluation_is_not_saved_as_running() -> None:
    in_use, hooks = LoadersInUse(), Hooks()
    training = prepared(shuffled(), in_use=in_use, hooks=hooks)
    evaluation = prepared(shuffled(), in_use=in_use, hooks=hooks)
    batches, held = iter(training), iter(evaluation)
    next(batches)
    next(held)
    assert evaluation.state_dict()["running"]
    for hooks.step in (1, 2, 3):
        next(batches)
    assert not evaluation.state_dict()["running"]
    assert training.state_dict()["running"]


def test_two_loaders_read_together_are_both_saved_as_running() -> None:
    in_use, hooks = LoadersInUse(), Hooks()
    pair = [prepared(shuffled(), in_use=in_use, hooks=hooks) for _ in range(2)]
    both = zip(*pair, strict=True)
    for hooks.step in range(5):
        next(both)
    hooks.step += 1
    assert [loader.state_dict()["running"] for loader in pair] == [True, True]


@pytest.mark.parametrize(
    ("even", "split", "valid", "samples"),
    [
        (True, False, [(None, 2), (None, 2), (1, 2), (0, 2)], [2, 2]),
        (False, False, [(None, 2), (None, 2), (None, 1)], [2, 1]),
        (True, True, [(None, 1)] * 5 + [(0, 1)], [3, 3]),
    ],
)
def test_valid_in_batch_excludes_repeated_samples(
    even: bool, split: bool, valid: list[Any], samples: list[int]
) -> None:
    found = []
    for rank in range(2):
        data = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        loader = prepared(data, rank=rank, size=2, even_batches=even, split_batches=split)
        found.append([(loader.valid_in_batch, loader.batch_samples) for _ in loader])
        assert len(loader) == len(found[-1]) == samples[rank]
        assert (loader.total_batch_size, loader.total_dataset_length) == (2 if split else 4, 5)
    assert sorted(found[0] + found[1], key=str) == sorted(valid, key=str)


def test_drop_last_of_the_users_batch_sampler_is_respected() -> None:
    def make(rank: int) -> PreparedLoader:
        data = TensorDataset(torch.arange(11))
        batches = BatchSampler(SequentialSampler(data), 2, drop_last=True)
        return prepared(DataLoader(data, batch_sampler=batches), rank=rank, size=2)

    assert [values(make(rank)) for rank in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert len(make(0)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_that_skips_first_batches_shares_the_epoch_count(workers: int) -> None:
    whole = prepared(shuffled(num_workers=workers), size=2)
    epochs = [values(whole) for _ in range(3)]
    loader = prepared(shuffled(num_workers=workers), size=2)
    later = skip_first_batches(skip_first_batches(loader, 1), 2)
    assert isinstance(later, PreparedLoader)
    assert (len(later), later.total_batch_size) == (3, 4)
    assert [values(later), values(loader), values(later)] == [epochs[0][3:], epochs[1], epochs[2][3:]]


def test_skipped_batches_are_not_skipped_twice_after_a_resume() -> None:
    """Scripts that compute their position skip batches that the restored loader skips too."""
    undisturbed = prepared(shuffled())
    epochs = [values(undisturbed) for _ in range(3)]
    for used, skipped, expected in ((4, 4, epochs[1][4:]), (11, 0, epochs[2])):
        stopped = prepared(shuffled())
        values(stopped)
        batches = iter(stopped)
        for _ in range(used):
            next(batches)
        resumed = prepared(shuffled())
        resumed.load_state_dict(stopped.state_dict())
        assert values(skip_first_batches(resumed, skipped)) == expected


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"batch_size": None}, {"shuffle": True, "drop_last": True}])
def test_skip_first_batches_of_a_plain_dataloader(options: dict[str, Any]) -> None:
    loader = DataLoader(TensorDataset(torch.arange(11)), **{"batch_size": 2} | options)
    torch.manual_seed(4)
    whole = [batch[0].tolist() for batch in loader]
    torch.manual_seed(4)
    later = skip_first_batches(loader, 3)
    assert [batch[0].tolist() for batch in later] == whole[3:]
    assert len(later) == len(whole) - 3
    assert type(later) is DataLoader


def test_set_epoch_selects_the_epoch_and_keeps_a_resumed_position() -> None:
    whole = prepared(shuffled())
    epochs = [values(whole) for _ in range(4)]
    loader = prepared(shuffled())
    loader.set_epoch(2)
    assert values(loader) == epochs[2]
    assert loader.iteration == 3
    batches = iter(loader)
    next(batches)
    resumed = prepared(shuffled())
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(3)
    assert values(resumed) == epochs[3][1:]
    resumed.set_epoch(0)
    assert values(resumed) == epochs[0]


def test_order_that_differs_from_the_checkpoint_causes_a_warning() -> None:
    stopped = prepared(shuffled(22))
    next(iter(stopped))
    batches = iter(stopped)
    next(batches)
    resumed = prepared(shuffled(24))
    resumed.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="order for epoch 1 differs"):
        next(iter(resumed))


def test_to_device_moves_nested_batches_and_objects_with_a_to_method() -> None:
    class Own(dict[str, Any]):
        moved_to: Any = None

        def to(self, device: Any) -> Own:
            self.moved_to = device
            return self

    Pair = namedtuple("Pair", "left right")
    batch = {"a": [torch.zeros(2)], "b": Pair(torch.ones(1), "text"), "c": Own()}
    moved = to_device(batch, torch.device("meta"), non_blocking=True)
    assert moved["a"][0].is_meta
    assert moved["b"].left.is_meta
    assert moved["b"].right == "text"
    assert moved["c"].moved_to == torch.device("meta")


def test_unknown_rng_types_are_rejected() -> None:
    with pytest.raises(RuntimeMisuse, match=r"'sobol'.*torch, cuda, numpy, python"):
        prepared(shuffled(), rng_types=["generator", "sobol"])


def test_iteration_on_one_rank_makes_no_collective_call() -> None:
    """There is no process group: a collective would fail."""
    loader = prepared(shuffled(), rank=0, size=4, rng_types=["generator"])
    assert len(values(loader)) == 3
    assert loader.passes == 1


def test_evaluation_on_rank_0_alone_ends_and_warns_once() -> None:
    ended = run_ranks("alone.py", size=2)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert ended.outputs[0].count("saw 4") == 3
    assert ended.outputs[0].count("on some ranks only, and each of them got only its own part, 1/2") == 1
    assert "on some ranks only" not in ended.outputs[1]
