"""Permutation, a shuffle without a list: a bijection that differs by epoch and is as even as a shuffle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.permutation import LISTED, Permutation, PermutationSampler

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000, LISTED, LISTED + 1, 20_011, 65_536, 99_999])
def test_permutation_yields_every_sample_once(length: int) -> None:
    order = Permutation(length, seed=3, epoch=1).at(np.arange(length))
    assert np.array_equal(np.sort(order), np.arange(length))


def test_permutation_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(Permutation(50_000, seed=seed, epoch=epoch).at(np.arange(50_000)))

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(*parts)) for parts in ((1, 2), (1, 3), (2, 2))}) == 3


def test_permutation_can_be_read_at_any_positions() -> None:
    order = Permutation(1 << 61, seed=0, epoch=0)
    places = np.array([0, 5, (1 << 61) - 1])
    found = order.at(places)
    assert np.array_equal(order.at(places[1:2]), found[1:2])
    assert ((found >= 0) & (found < 1 << 61)).all()
    assert len(set(found.tolist())) == 3


@pytest.mark.parametrize("seed", range(4))
def test_permutation_is_as_even_as_a_shuffle(seed: int) -> None:
    """By the chi-square test over 64 x 64 cells of (position, sample). Neighbours are separated, and half of them come
    in ascending order."""
    length, cells = 262_144 - 77, 64
    order = Permutation(length, seed=seed, epoch=0).at(np.arange(length))
    counts, _, _ = np.histogram2d(np.arange(length), order, bins=cells)
    expected = length / cells**2
    degrees = (cells - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5
    steps = np.diff(order)
    assert abs((steps > 0).mean() - 0.5) < 0.01
    assert (np.abs(steps) < length / 100).mean() == pytest.approx(0.02, abs=0.002)
    assert np.abs(np.corrcoef(np.arange(length), order)[0, 1]) < 0.01


def test_sampler_reshuffles_a_plain_loader_each_epoch() -> None:
    sampler = PermutationSampler(20_000, seed=5)
    loader = DataLoader(TensorDataset(torch.arange(20_000)), batch_size=64, sampler=sampler)
    first, second = ([item for (batch,) in loader for item in batch.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20_000))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert len(PermutationSampler(TensorDataset(torch.arange(9)))) == 9


def test_negative_size_is_refused() -> None:
    with pytest.raises(RuntimeMisuse, match=r"between 0 and 2\^62, not -1"):
        PermutationSampler(-1)
