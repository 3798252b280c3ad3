"""split_between_processes: which items each rank gets."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.split_between_processes import split

pytestmark = pytest.mark.torch


def parts(value: Any, ranks: int, *, padding: bool = False) -> list[Any]:
    return [split(value, rank=rank, ranks=ranks, apply_padding=padding)[0] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("length", "ranks", "lengths"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 2, [2, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_first_ranks_get_one_more_item(length: int, ranks: int, lengths: list[int]) -> None:
    items = list(range(length))
    found = parts(items, ranks)
    assert [len(part) for part in found] == lengths
    assert [item for part in found for item in part] == items


@pytest.mark.parametrize(("length", "ranks"), [(10, 4), (3, 2), (2, 4), (1, 3)])
def test_padding_repeats_the_last_item(length: int, ranks: int) -> None:
    items = [f"item {number}" for number in range(length)]
    for rank, part in enumerate(parts(items, ranks, padding=True)):
        plan = split(items, rank=rank, ranks=ranks, apply_padding=True)[1]
        assert len(part) == plan.longest == -(-length // ranks)
        assert part[plan.real(rank) :] == [items[-1]] * (plan.longest - plan.real(rank))
    assert len(items) == length


def test_empty_list_is_not_padded() -> None:
    assert parts([], 2, padding=True) == [[], []]


@pytest.mark.parametrize("padding", [False, True])
def test_split_keeps_the_type(padding: bool) -> None:
    assert parts((1, 2, 3), 2, padding=padding) == [(1, 2), (3, 3) if padding else (3,)]
    assert [list(part) for part in parts(range(3), 2, padding=padding)] == [[0, 1], [2, 2] if padding else [2]]
    tensors = parts(torch.arange(6).reshape(3, 2), 2, padding=padding)
    assert [part.tolist() for part in tensors] == [[[0, 1], [2, 3]], [[4, 5], [4, 5]] if padding else [[4, 5]]]
    arrays = parts(numpy.arange(3), 2, padding=padding)
    assert [part.tolist() for part in arrays] == [[0, 1], [2, 2] if padding else [2]]


@pytest.mark.parametrize("padding", [False, True])
def test_dict_is_split_by_value_and_left_unchanged(padding: bool) -> None:
    given = {"text": ["a", "b", "c"], "score": torch.tensor([1.0, 2.0, 3.0]), "more": {"n": (1, 2, 3)}}
    before = dict(given)
    _, second = parts(given, 2, padding=padding)
    assert second["text"] == (["c", "c"] if padding else ["c"])
    assert second["score"].tolist() == ([3.0, 3.0] if padding else [3.0])
    assert second["more"] == {"n": (3, 3) if padding else (3,)}
    assert given == before
    assert given["text"] == ["a", "b", "c"]


class Selectable:
    """A dataset with ``select``, as those of Hugging Face."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]

    def select(self, indices: list[int]) -> Selectable:
        return Selectable([self.items[index] for index in indices])


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.parametrize("dataset", [Selectable([0, 1, 4]), Squares(), TensorDataset(torch.tensor([0, 1, 4]))])
def test_datasets_are_split(dataset: Any) -> None:
    def items(part: Any) -> list[int]:
        return [
            int(part[index] if not isinstance(part[index], tuple) else part[index][0]) for index in range(len(part))
        ]

    assert [items(part) for part in parts(dataset, 2)] == [[0, 1], [4]]
    assert [items(part) for part in parts(dataset, 2, padding=True)] == [[0, 1], [4, 4]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a prompt", "cannot split str 'a prompt': it takes a list"),
        (torch.tensor(1.0), "cannot split Tensor"),
        (iter([1]), "cannot split list_iterator"),
        ({1, 2}, "cannot split set"),
        (7, "cannot split int 7"),
        ({"a": [1, 2], "b": [1]}, r"all values of a dict must have the same length.*\{'a': 2, 'b': 1\}"),
        ({}, "cannot split an empty dict"),
        ({"a": "text"}, "cannot split str"),
    ],
)
def test_unsupported_values_cannot_be_split(value: Any, message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        split(value, rank=0, ranks=2, apply_padding=False)
