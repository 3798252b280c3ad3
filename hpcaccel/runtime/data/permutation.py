"""A seeded permutation that is stored only if it is short. Otherwise the sample at each position is computed on demand.

It is computed by a Feistel network over pairs (row, column) of an almost square grid: each round adds to one half of a
pair a number that depends on the other half. Such a round is invertible, so no two positions get the same sample. A
result outside the data is permuted again until it is inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.rng.determinism import mix

__all__ = ["Permutation", "PermutationSampler"]

Positions = npt.NDArray[np.uint64]

ROUNDS = 6
"""Number of rounds of the Feistel network."""
CHUNK = 4096
"""Number of samples computed at once."""
LISTED = 1 << 14
"""Up to this many samples, the permutation is drawn with ``torch.randperm`` and stored (at most 128 KiB)."""

# Constants of splitmix64.
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xBF58476D1CE4E5B9)
_HALF, _SOME = np.uint64(32), np.uint64(29)


class Permutation:
    """A permutation of 0 to ``length - 1``, determined by ``seed`` and ``epoch``."""

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self.length = length
        self._listed: npt.NDArray[np.int64] | None = None
        if length <= LISTED:
            generator = torch.Generator().manual_seed(mix(seed, epoch))
            self._listed = torch.randperm(length, generator=generator, device="cpu").numpy()
            return
        rows = math.isqrt(length - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-length // rows))
        self._keys = [np.uint64(mix(seed, epoch, number)) for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at ``positions``. All positions must be between 0 and ``length - 1``."""
        if self._listed is not None:
            return self._listed[positions]
        found = self._shuffle(positions.astype(np.uint64))
        outside = np.flatnonzero(found >= self.length)
        while outside.size:
            found[outside] = self._shuffle(found[outside])
            outside = outside[found[outside] >= self.length]
        return found.astype(np.int64)

    def _shuffle(self, positions: Positions) -> Positions:
        """Permute the positions within the whole grid."""
        left: Positions = positions // self._columns
        right: Positions = positions % self._columns
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _add(right, _hash(left, key), self._columns)
            else:
                left = _add(left, _hash(right, key), self._rows)
        left *= self._columns
        left += right
        return left


def _hash(values: Positions, key: np.uint64) -> Positions:
    """Hash each value to 32 bits."""
    mixed: Positions = (values ^ key) * _FIRST
    mixed ^= mixed >> _SOME
    mixed *= _SECOND
    mixed >>= _HALF
    return mixed


def _add(values: Positions, bits: Positions, size: np.uint64) -> Positions:
    """Scale the 32 random ``bits`` to numbers below ``size``, and add them to ``values`` modulo ``size``."""
    total: Positions = values + (bits * size >> _HALF)
    total -= (total >= size) * size
    return total


class PermutationSampler(Sampler[int]):
    """A random order that is not stored as a list: start-up time and memory do not grow with the size of the data.

    Replaces ``RandomSampler`` in any DataLoader. A prepared loader with this sampler resumes within an epoch at once.
    Each iteration is an epoch; ``set_epoch`` sets its number. The order is a function of (seed, epoch).

    Args:
        data_source: the dataset, or the number of its samples (at most 2^62).
        seed: must be the same on every rank.

    Raises:
        RuntimeMisuse: the number of samples is negative or too large.

    Example::

        loader = DataLoader(dataset, batch_size=32, sampler=hpcaccel.PermutationSampler(dataset, seed=0))
    """

    def __init__(self, data_source: Sized | int, *, seed: int = 0) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0
        length = data_source if isinstance(data_source, int) else len(data_source)
        if not 0 <= length <= 1 << 62:
            raise RuntimeMisuse(f"PermutationSampler: the number of samples must be between 0 and 2^62, not {length}")

    def __len__(self) -> int:
        return self.data_source if isinstance(self.data_source, int) else len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the epoch of the next iteration."""
        self.epoch = epoch

    def permutation(self) -> Permutation:
        """The order of the next epoch."""
        return Permutation(len(self), seed=self.seed, epoch=self.epoch)

    def __iter__(self) -> Iterator[int]:
        order = self.permutation()
        self.epoch += 1
        for start in range(0, len(order), CHUNK):
            yield from order.at(np.arange(start, min(start + CHUNK, len(order)))).tolist()
