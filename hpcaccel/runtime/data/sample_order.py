"""One epoch's order of samples. It is drawn as a whole if the sampler's algorithm is known.

PyTorch's own samplers draw a tensor and convert it to a list of Python integers, which costs several times as much time
and memory as the tensor. Here the tensor is kept. It has the values that the sampler would return, and the generator is
left in the same state.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from hpcaccel.runtime.data.permutation import CHUNK, Permutation, PermutationSampler

__all__ = ["PackedIndices", "RawBatches", "SampleOrder", "TooManySamples", "draw", "is_known", "listed", "pack"]


class SampleOrder:
    """An epoch's samples in order.

    Args:
        values: a range, list, tuple, tensor of integers or ``Permutation``.
        names: a sequence of samples into which the values are indices; None if the values are the samples.
        finish: draws from the generator the numbers that the sampler draws when it is read past its last sample.
    """

    def __init__(self, values: Any, *, names: Any = None, finish: Callable[[], object] | None = None) -> None:
        self._length = len(values)
        self._values = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
        self._names = names
        self._finish = finish

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Any:
        return self.slice(place, place + 1)[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def slice(self, start: int, stop: int) -> list[Any]:
        """The samples from ``start`` up to ``stop``."""
        values = self._values
        if isinstance(values, np.ndarray):
            found = values[start:stop].tolist()
        elif isinstance(values, Permutation):
            found = values.at(np.arange(start, min(stop, self._length))).tolist()
        else:
            found = list(values[start:stop])
        return found if self._names is None else [self._names[index] for index in found]

    def runs(self, first: int, *, step: int, width: int, count: int) -> Iterator[list[Any]]:
        """Yield ``count`` batches of ``width`` samples that start at ``first``, ``first + step`` and so on."""
        starts = range(first, first + count * step, step)
        values = self._values
        if isinstance(values, Permutation):
            yield from _computed(values, starts, width)
        elif isinstance(values, np.ndarray) and self._names is None:
            for start in starts:
                yield values[start : start + width].tolist()
        elif isinstance(values, range) and self._names is None:
            for start in starts:
                yield list(values[start : start + width])
        else:
            for start in starts:
                yield self.slice(start, start + width)

    def finish(self) -> None:
        """Draw the numbers that the sampler draws past its last sample. Later calls do nothing."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _computed(order: Permutation, starts: range, width: int) -> Iterator[list[int]]:
    """Compute several batches at once, because computing one batch takes almost as long."""
    many = max(1, CHUNK // width)
    within = np.arange(width)
    for number in range(0, len(starts), many):
        beginnings = np.asarray(starts[number : number + many])
        yield from order.at((beginnings[:, None] + within).ravel()).reshape(-1, width).tolist()


def is_known(sampler: Any) -> bool:
    """Whether ``draw`` supports this sampler."""
    return getattr(type(sampler), "__iter__", None) in _KNOWN


def draw(sampler: Any, generator: torch.Generator | None = None) -> SampleOrder:
    """The order that a supported sampler would return now.

    Args:
        generator: generator to draw from; None means the generator that the sampler uses.
    """
    return _KNOWN[type(sampler).__iter__](sampler, generator)


def _sequential(sampler: Any, generator: torch.Generator | None) -> SampleOrder:
    return SampleOrder(range(len(sampler.data_source)))


def _random(sampler: Any, generator: torch.Generator | None) -> SampleOrder:
    size, wanted = len(sampler.data_source), sampler.num_samples
    generator = generator or sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    if sampler.replacement:
        return SampleOrder(torch.randint(high=size, size=(wanted,), dtype=torch.int64, generator=generator))
    rounds, rest = divmod(wanted, size)
    if (rounds, rest) == (1, 0):
        order = torch.randperm(size, generator=generator)
    else:
        parts = [torch.randperm(size, generator=generator) for _ in range(rounds + (rest > 0))]
        order = torch.cat(parts)[:wanted]
    # The sampler draws another permutation for the rest, even if the rest is empty.
    return SampleOrder(order, finish=None if rest else lambda: torch.randperm(size, generator=generator))


def _subset(sampler: Any, generator: torch.Generator | None) -> SampleOrder:
    order = torch.randperm(len(sampler.indices), generator=generator or sampler.generator)
    return SampleOrder(order, names=sampler.indices)


def _weighted(sampler: Any, generator: torch.Generator | None) -> SampleOrder:
    return SampleOrder(
        torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=generator or sampler.generator
        )
    )


def _permuted(sampler: Any, generator: torch.Generator | None) -> SampleOrder:
    return SampleOrder(sampler.permutation())


_KNOWN: dict[Any, Callable[[Any, torch.Generator | None], SampleOrder]] = {
    SequentialSampler.__iter__: _sequential,
    RandomSampler.__iter__: _random,
    SubsetRandomSampler.__iter__: _subset,
    WeightedRandomSampler.__iter__: _weighted,
    PermutationSampler.__iter__: _permuted,
}


class TooManySamples(Exception):
    """There are more items than ``len()`` returned. ``items`` iterates over all items, and reads those beyond
    ``len()`` lazily."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__()
        self.items = items


def listed(items: Iterable[Any], length: int) -> Any:
    """The items, as a tensor if all of them are integers, else as a list.

    Raises:
        TooManySamples: there are more than ``length`` items.
    """
    iterator = iter(items)
    numbers: array[int] | None = array("q")
    others: list[Any] = []
    while chunk := list(islice(iterator, min(length - len(numbers or others), 1 << 16))):
        if numbers is not None and _are_integers(chunk):
            numbers.extend(map(int, chunk))
            continue
        if numbers is not None:
            others, numbers = numbers.tolist(), None
        others += chunk
    _refuse_more(others if numbers is None else numbers, iterator)
    return _tensor(numbers) if numbers else others


class RawBatches(Protocol):
    """An epoch's raw batches, with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class PackedIndices:
    """Lists of integers, stored consecutively in one array."""

    def __init__(self, numbers: array[int], ends: array[int]) -> None:
        self.flat = SampleOrder(_tensor(numbers) if numbers else [])
        self._ends = np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> list[Any]:
        return self.flat.slice(int(self._ends[number]), int(self._ends[number + 1]))

    def __iter__(self) -> Iterator[list[Any]]:
        return (self[number] for number in range(len(self)))

    def is_uniform(self, size: int) -> bool:
        """Whether all lists have ``size`` entries; the last list may be shorter."""
        sizes = np.diff(self._ends)
        return bool((sizes[:-1] == size).all() and (sizes[-1:] <= size).all())


def pack(batches: Iterable[Any], length: int) -> PackedIndices | list[Any]:
    """The batches, as ``PackedIndices`` if all of them are lists of integers, else as a list.

    Raises:
        TooManySamples: there are more than ``length`` batches.
    """
    iterator = iter(batches)
    numbers, ends = array("q"), array("q", [0])
    kept: list[Any] = []
    for batch in islice(iterator, length):
        if not kept and type(batch) is list and _are_integers(batch):
            numbers.extend(map(int, batch))
            ends.append(len(numbers))
            continue
        if not kept:
            kept = list(_unpacked(numbers, ends))
        kept.append(batch)
    _refuse_more(kept or _unpacked(numbers, ends), iterator)
    return kept or PackedIndices(numbers, ends)


def _unpacked(numbers: array[int], ends: array[int]) -> Iterator[list[int]]:
    return (numbers[begin:end].tolist() for begin, end in pairwise(ends))


def _refuse_more(found: Iterable[Any], iterator: Iterator[Any]) -> None:
    more = list(islice(iterator, 1))
    if more:
        raise TooManySamples(chain(found, more, iterator))


def _are_integers(items: list[Any]) -> bool:
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, items)))


def _tensor(numbers: array[int]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(numbers, dtype=np.int64))
