"""Which samples a rank gets: as in Accelerate's golden cases, in the sampler's order, from any position on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.permutation import PermutationSampler
from hpcaccel.runtime.data.sample_order import SampleOrder, draw
from hpcaccel.runtime.data.sampling import Order
from hpcaccel.runtime.data.sharding import BatchesPart, RankPart, SamplesPart, Sharing, WalkedPart

pytestmark = pytest.mark.torch

GOLDEN = json.loads((Path(__file__).parents[1] / "data/sharding/golden.json").read_text())


def nothing() -> None: ...


def ready(samples: int, sharing: Sharing, start: int = 0) -> RankPart:
    return SamplesPart(SampleOrder(range(samples)), sharing, start, nothing)


def walked(samples: int, sharing: Sharing, start: int = 0) -> RankPart:
    assert sharing.batch_size is not None
    raw = BatchSampler(SequentialSampler(range(samples)), sharing.batch_size, sharing.drop_last)
    return WalkedPart(raw, sharing, start // sharing.batch_size)


@pytest.mark.parametrize("make", [ready, walked])
def test_ranks_get_the_batches_of_the_golden_cases(make: Callable[..., RankPart]) -> None:
    assert len(GOLDEN["sized"]) > 600
    for case, expected in GOLDEN["sized"].items():
        samples, batch_size, size, split, even, drop_last = map(int, case.split("/"))
        parts = [
            make(samples, Sharing(rank=rank, size=size, batch_size=batch_size, even=bool(even), split=bool(split),
                                  drop_last=bool(drop_last)))
            for rank in range(size)
        ]  # fmt: skip
        assert [list(part) for part in parts] == expected, case
        assert [part.total for part in parts] == [len(part) for part in expected], case


@pytest.mark.parametrize("make", [BatchesPart, WalkedPart])
def test_batches_without_a_fixed_size_match_the_golden_cases(make: Callable[..., RankPart]) -> None:
    for case, expected in GOLDEN["unsized"].items():
        size, even, drop_last = map(int, case.split("/"))
        found = [
            list(make(GOLDEN["raw"], Sharing(rank=rank, size=size, batch_size=None, even=bool(even),
                                             drop_last=bool(drop_last)), 0))
            for rank in range(size)
        ]  # fmt: skip
        assert found == expected, case


sizes = st.integers(1, 6)


@pytest.mark.parametrize("make", [ready, walked])
@settings(deadline=None)
@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes, even=st.booleans(), split=st.booleans())
def test_each_sample_is_valid_once(
    make: Callable[..., RankPart], samples: int, batch_size: int, size: int, even: bool, split: bool
) -> None:
    batch_size = batch_size * size if split else batch_size
    seen = []
    for rank in range(size):
        part = make(samples, Sharing(rank=rank, size=size, batch_size=batch_size, even=even, split=split))
        for number, batch in enumerate(list(part), 1):
            assert part.samples(number) == len(batch)
            seen += batch[: part.valid(number)]
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("make", [ready, walked])
@settings(deadline=None)
@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes, done=st.integers(0, 8), even=st.booleans())
def test_part_begun_in_the_middle_is_the_rest_of_the_whole_part(
    make: Callable[..., RankPart], samples: int, batch_size: int, size: int, done: int, even: bool
) -> None:
    for rank in range(size):
        sharing = Sharing(rank=rank, size=size, batch_size=batch_size, even=even)
        assert list(make(samples, sharing, done * size * batch_size)) == list(make(samples, sharing))[done:]


@pytest.mark.parametrize(("batch_size", "what"), [(None, "no batch_size"), (5, "batch_size=5")])
def test_batches_that_cannot_be_split_are_refused(batch_size: int | None, what: str) -> None:
    with pytest.raises(RuntimeMisuse, match=f"{what}.*multiple of 2"):
        Sharing(rank=0, size=2, batch_size=batch_size, split=True)


def data(samples: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def drawn(samples: SampleOrder, batch: int = 3) -> list[int]:
    whole, rest = divmod(len(samples), batch)
    found = [item for run in samples.runs(0, step=batch, width=batch, count=whole) for item in run]
    return found + samples.slice(whole * batch, whole * batch + rest)


SAMPLERS: dict[str, Callable[[torch.Generator | None], Any]] = {
    "sequential": lambda generator: SequentialSampler(range(100)),
    "random": lambda generator: RandomSampler(range(100), generator=generator),
    "random, fewer": lambda generator: RandomSampler(range(100), num_samples=37, generator=generator),
    "random, more": lambda generator: RandomSampler(range(100), num_samples=250, generator=generator),
    "random, twice": lambda generator: RandomSampler(range(100), num_samples=200, generator=generator),
    "replaced": lambda generator: RandomSampler(range(100), replacement=True, generator=generator),
    "replaced, more": lambda generator: RandomSampler(range(9), True, num_samples=333, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(50, 90), generator=generator),
    "weighted": lambda generator: WeightedRandomSampler([1.0, 5.0, 2.0, 0.5], 77, generator=generator),
    "permuted": lambda generator: PermutationSampler(30_000),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_drawn_order_and_generator_state_match_the_sampler(kind: str, own: bool) -> None:
    generators = [torch.Generator().manual_seed(6) if own else None for _ in range(2)]
    samplers = [SAMPLERS[kind](generator) for generator in generators]
    torch.manual_seed(9)
    for _ in range(2):
        torch.manual_seed(9)
        expected = list(samplers[0])
        state = torch.get_rng_state()
        torch.manual_seed(9)
        samples = draw(samplers[1])
        if kind == "permuted":
            samplers[1].epoch += 1
        assert drawn(samples) == expected
        samples.finish()
        assert torch.equal(torch.get_rng_state(), state)
        if generators[0] is not None and generators[1] is not None:
            assert torch.equal(generators[0].get_state(), generators[1].get_state())


def alone(order: Order) -> list[Any]:
    return list(order.part(Sharing(rank=0, size=1, batch_size=order.batch_size, drop_last=order.drop_last), 0))


def orders(make: Callable[[], DataLoader[Any]], *, epochs: int, seed: int = 5, **options: Any) -> list[list[Any]]:
    order = Order(make(), seed, **options)
    found = []
    for epoch in range(epochs):
        order.begin(epoch)
        found.append(alone(order))
    return found


def test_order_depends_on_seed_and_epoch_only() -> None:
    def shuffled() -> DataLoader[Any]:
        torch.rand(3)  # advances the global generator
        return DataLoader(data(), batch_size=3, shuffle=True)

    first, again = orders(shuffled, epochs=3), orders(shuffled, epochs=3)
    assert first == again
    assert first[0] != first[1] != first[2]
    assert orders(shuffled, epochs=1, seed=6) != first[:1]


@pytest.mark.parametrize("samples", [20, 21])
@pytest.mark.parametrize("drop_last", [True, False])
def test_users_generator_gives_the_order_of_a_plain_loop(samples: int, drop_last: bool) -> None:
    def shuffled() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        return DataLoader(data(samples), batch_size=3, shuffle=True, generator=generator, drop_last=drop_last)

    plain = shuffled()
    expected = [[batch[0].tolist() for batch in plain] for _ in range(3)]
    assert orders(shuffled, epochs=3) == expected


def test_seedable_order_is_seeded_with_seed_plus_epoch() -> None:
    def shuffled() -> DataLoader[Any]:
        return DataLoader(data(), batch_size=20, shuffle=True, generator=torch.Generator())

    found = orders(shuffled, epochs=2, seed=42, seedable=True)
    assert found[1] == [torch.randperm(20, generator=torch.Generator().manual_seed(43)).tolist()]


class Custom(Sampler[Any]):
    """Draws from the global generator, as samplers written for one process do."""

    def __init__(self, length: int | None = 12, items: int = 12) -> None:
        self.length = length
        self.items = items
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.items).tolist())


class Sized(Custom):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


def test_custom_sampler_draws_the_same_order_on_all_ranks() -> None:
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        sampler = Sized()
        found.append(orders(lambda: DataLoader(data(), batch_size=5, sampler=sampler), epochs=2))  # noqa: B023
        assert sampler.epochs == [0, 1]
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    assert sorted(chain.from_iterable(found[0][0])) == list(range(12))
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("kind", [Custom, lambda: Sized(length=5)], ids=["no length", "too short a length"])
def test_sampler_without_a_true_length_is_iterated_to_its_end(kind: Callable[[], Custom]) -> None:
    found = orders(lambda: DataLoader(data(), batch_size=5, sampler=kind()), epochs=1)[0]
    assert [len(batch) for batch in found] == [5, 5, 2]
    assert sorted(chain.from_iterable(found)) == list(range(12))


class Names(Sized):
    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b", "c", "d"])


def test_sample_indices_may_have_any_type() -> None:
    assert orders(lambda: DataLoader({}, batch_size=3, sampler=Names(4)), epochs=1) == [[["a", "b", "c"], ["d"]]]  # type: ignore[arg-type]


class Batches(BatchSampler):
    """A user's batch sampler."""

    def __init__(self, batches: list[list[int]], **says: Any) -> None:
        self.batches = batches
        self.__dict__.update(says)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def shared(batches: list[list[int]], size: int = 2, **says: Any) -> list[list[list[int]]]:
    order = Order(DataLoader(data(), batch_sampler=Batches(batches, **says)), 0)
    order.begin(0)
    return [
        list(order.part(Sharing(rank=rank, size=size, batch_size=order.batch_size, drop_last=order.drop_last), 0))
        for rank in range(size)
    ]


def test_batches_of_a_custom_sampler_keep_their_sizes() -> None:
    """Accelerate loses whole rounds that end in a batch shorter than the sampler's batch_size."""
    assert shared([[0, 1], [2], [3, 4]]) == [[[0, 1], [3, 4]], [[2], [0, 1]]]
    assert shared([[0, 1], [2], [3, 4], [5, 6]], batch_size=2) == [[[0, 1], [3, 4]], [[2], [5, 6]]]


def test_last_round_of_a_custom_sampler_is_filled_up_or_dropped() -> None:
    assert shared([[0, 1], [2, 3], [4]], batch_size=2) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert shared([[0, 1], [2, 3], [4, 5]], batch_size=2, drop_last=True) == [[[0, 1]], [[2, 3]]]


def test_users_sampler_is_left_unchanged() -> None:
    loader = DataLoader(data(), batch_size=3, shuffle=True)
    orders(lambda: loader, epochs=1)
    assert loader.sampler.generator is None  # type: ignore[attr-defined]


def test_distributed_sampler_is_refused() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(RuntimeMisuse, match=r"DistributedSampler.*shuffle=True"):
        Order(DataLoader(data(), sampler=sampler), 5)
