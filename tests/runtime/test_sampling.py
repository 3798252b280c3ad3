"""Which samples a rank gets: every one, equally many on each rank, the same from any point on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.sampling import Order, own_part


def batches(samples: int, batch_size: int, *, drop_last: bool = False) -> list[list[int]]:
    return list(BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last))


def parts(raw: list[list[int]], size: int, **options: Any) -> list[list[list[int]]]:
    return [list(own_part(raw, rank=rank, world_size=size, **options)) for rank in range(size)]


sizes = st.integers(1, 6)


@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes, start=st.integers(0, 8))
def test_even_ranks_get_equally_many_full_batches_that_cover_everything(
    samples: int, batch_size: int, size: int, start: int
) -> None:
    raw = batches(samples, batch_size)
    found = parts(raw, size, batch_size=batch_size, start=start)
    assert len({len(part) for part in found}) == 1
    seen = [sample for part in found for batch in part for sample in batch]
    wanted = {sample for batch in raw[start:] for sample in batch}
    assert wanted <= set(seen)
    if size > 1:
        assert {len(batch) for part in found for batch in part} <= {batch_size}
        assert len(seen) - len(wanted) < size * batch_size


@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes)
def test_uneven_ranks_get_each_sample_once(samples: int, batch_size: int, size: int) -> None:
    found = parts(batches(samples, batch_size), size, batch_size=batch_size, even=False)
    assert sorted(sample for part in found for batch in part for sample in batch) == list(range(samples))


@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes)
def test_dropping_unfinished_rounds_leaves_full_batches_only(samples: int, batch_size: int, size: int) -> None:
    found = parts(batches(samples, batch_size, drop_last=True), size, batch_size=batch_size, drop_last=True)
    assert [len(part) for part in found] == [samples // batch_size // size] * size


@given(samples=st.integers(1, 60), batch_size=sizes, size=sizes, done=st.integers(0, 8))
def test_a_part_from_the_middle_is_the_rest_of_the_whole_part(
    samples: int, batch_size: int, size: int, done: int
) -> None:
    raw = batches(samples, batch_size)
    whole = parts(raw, size, batch_size=batch_size)
    rest = parts(raw, size, batch_size=batch_size, start=done * size)
    assert rest == [part[done:] for part in whole]


def test_the_last_round_is_filled_up_with_the_first_samples() -> None:
    assert parts(batches(7, 2), 2, batch_size=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]


def test_short_data_is_repeated() -> None:
    assert parts([[0, 1]], 3, batch_size=4) == [[[0, 1, 0, 1]]] * 3


def test_batches_of_no_fixed_size_are_filled_up_whole() -> None:
    assert parts([[0], [1, 2], [3]], 2, batch_size=None) == [[[0], [3]], [[1, 2], [0]]]


def data(samples: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def orders(make: Callable[[], DataLoader[Any]], *, epochs: int, seed: int = 5) -> list[list[list[int]]]:
    order = Order(make(), seed)
    found = []
    for epoch in range(epochs):
        order.begin(epoch)
        found.append([list(batch) for batch in order])
    return found


def test_the_order_of_an_epoch_depends_on_the_seed_and_the_epoch_alone() -> None:
    def shuffled() -> DataLoader[Any]:
        torch.rand(3)  # the global generator is somewhere else each time
        return DataLoader(data(), batch_size=3, shuffle=True)

    first, again = orders(shuffled, epochs=3), orders(shuffled, epochs=3)
    assert first == again
    assert first[0] != first[1] != first[2]
    assert orders(shuffled, epochs=1, seed=6) != first[:1]


def test_a_generator_of_the_users_gives_the_order_of_a_plain_loop() -> None:
    def shuffled() -> DataLoader[Any]:
        return DataLoader(data(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(11))

    plain = shuffled()
    expected = [[batch[0].tolist() for batch in plain] for _ in range(3)]
    assert orders(shuffled, epochs=3) == expected


def test_the_users_own_sampler_is_left_as_it_is() -> None:
    loader = DataLoader(data(), batch_size=3, shuffle=True)
    Order(loader, 5)
    assert loader.sampler.generator is None


def test_data_that_is_sharded_already_is_refused() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(RuntimeMisuse, match=r"DistributedSampler.*shuffle=True"):
        Order(DataLoader(data(), sampler=sampler), 5)
