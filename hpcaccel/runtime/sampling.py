"""Which samples a rank gets, in which order.

The user's own sampler decides the order, one *raw* batch after the other, the same on every rank; rank r of P takes
every P-th raw batch, beginning with the r-th. A position in an epoch is the number of raw batches that all ranks
together have used: it means the same to another number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.determinism import mix

__all__ = ["Order", "own_part", "rounds"]

B = TypeVar("B")


class Order:
    """The raw batches of a map-style loader, epoch by epoch.

    A sampler that draws from a generator of the user's keeps doing so, as in a loop of one process. One that would draw
    from the global generator, which differs by rank, draws from a seed of its own and the epoch's number.

    Raises:
        RuntimeMisuse: the loader is sharded already.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.seed = seed
        self.auto_collation = loader.batch_sampler is not None
        raw: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(raw, "sampler", raw)
        if isinstance(inner, DistributedSampler):
            raise RuntimeMisuse(
                "this DataLoader has a DistributedSampler, and prepare() shards too: each rank would see a part of a "
                "part. Give the DataLoader shuffle=True (or your own sampler of the whole data) instead"
            )
        self.users_generator: torch.Generator | None = getattr(inner, "generator", None)
        self._loaders_generator = loader.generator
        self._own_generator: torch.Generator | None = None
        if hasattr(inner, "generator") and inner.generator is None:
            self._own_generator = torch.Generator()
            inner = copy.copy(inner)
            inner.generator = self._own_generator
            if raw is not loader.sampler and type(raw) is BatchSampler:
                raw = copy.copy(raw)
                raw.sampler = inner
            elif raw is loader.sampler:
                raw = inner
        self._inner = inner
        self._raw: Iterable[Any] = raw

    def __len__(self) -> int:
        return len(self._raw)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int | None:
        return getattr(self._raw, "batch_size", None)

    @property
    def generator_state(self) -> torch.Tensor | None:
        return None if self.users_generator is None else self.users_generator.get_state()

    def begin(self, epoch: int) -> None:
        """Before each iteration of an epoch."""
        if self._own_generator is not None:
            self._own_generator.manual_seed(mix(self.seed, epoch))
        if self.users_generator is not None and self.users_generator is self._loaders_generator:
            # A plain DataLoader draws its workers' seed from the same generator first.
            torch.empty((), dtype=torch.int64).random_(generator=self.users_generator)
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._raw)


def rounds(batches: Iterable[B], size: int) -> Iterator[list[B]]:
    """Lists of ``size`` consecutive batches; the last one may be shorter."""
    iterator = iter(batches)
    while batch := list(islice(iterator, size)):
        yield batch


def own_part(
    batches: Iterable[Any],
    *,
    rank: int,
    world_size: int,
    start: int = 0,
    batch_size: int | None,
    even: bool = True,
    drop_last: bool = False,
) -> Iterator[Any]:
    """This rank's batches of an epoch, from raw batch ``start`` on.

    With ``even`` all ranks get equally many full batches: an unfinished round is filled up with the epoch's first
    samples, over and over if need be. Else the unfinished round's batches go to the first ranks.

    Args:
        batch_size: samples in a full batch; None where batches are of different sizes or no lists: then an unfinished
            round is filled up with whole batches.
    """
    if world_size == 1:
        yield from islice(batches, start, None)
        return
    iterator = iter(batches)
    first = list(islice(iterator, world_size))
    remaining = chain(first, iterator)
    for _ in islice(remaining, start):
        pass
    for batch in rounds(remaining, world_size):
        whole = len(batch) == world_size and (batch_size is None or len(batch[-1]) == batch_size)
        if whole:
            yield batch[rank]
        elif drop_last:
            return
        elif even:
            yield _fill(batch, first, size=world_size, batch_size=batch_size)[rank]
        elif rank < len(batch):
            yield batch[rank]


def _fill(batch: Sequence[Any], first: Sequence[Any], *, size: int, batch_size: int | None) -> list[Any]:
    if batch_size is None:
        filled = list(batch)
        while len(filled) < size:
            filled += first[: size - len(filled)]
        return filled
    samples = [sample for part in batch for sample in part]
    source = [sample for part in first for sample in part]
    while len(samples) < size * batch_size:
        samples += source[: size * batch_size - len(samples)]
    return [samples[i * batch_size : (i + 1) * batch_size] for i in range(size)]
