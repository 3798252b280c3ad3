"""The order of the samples. It is drawn once per epoch from the user's own sampler, and is the same on every rank.

A position in an epoch is the number of samples that all ranks together have used, so it is valid for any number of
ranks. If ``Order.is_flat`` is false, raw batches (see ``sharding``) are counted instead of samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sample_order import (
    PackedIndices,
    RawBatches,
    SampleOrder,
    TooManySamples,
    draw,
    is_known,
    listed,
    pack,
)
from hpcaccel.runtime.data.sharding import BatchesPart, RankPart, SamplesPart, Sharing, WalkedPart
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.rng.determinism import mix
from hpcaccel.runtime.rng.generators import IsolatedGenerators

__all__ = ["Order", "bring_to_main", "sampler_of"]


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler of single samples, which may be inside the batch sampler; if there is none, the batch sampler."""
    raw: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return getattr(raw, "sampler", raw)


def bring_to_main(loader: DataLoader[Any], group: RankGroup, *, seedable: bool, data_seed: int | None) -> int:
    """Set the generators of the sampler and the dataset to rank 0's states. Returns the seed of the order."""
    # Every rank draws, so that the global generators stay in the same state. Only rank 0's number is used.
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    if seedable:
        seed = torch.initial_seed()
    for owner in (sampler_of(loader), loader.dataset):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.set_state(group.from_main(generator.get_state()))
    return int(group.from_main(seed if data_seed is None else data_seed))


class Order:
    """The raw batches (see ``sharding``) of a map-style loader, epoch by epoch.

    If the sampler has a generator, the order is drawn from that generator, as in single-process training. A sampler
    without a generator would draw from the global generators, which differ between ranks. Its order is therefore drawn
    from a generator that is seeded with ``seed`` and the epoch.

    Args:
        seedable: whether to draw the order from a generator seeded with ``seed + epoch``, even if the sampler has its
            own generator.

    Raises:
        RuntimeMisuse: the loader already has a ``DistributedSampler``.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, seedable: bool = False) -> None:
        self.seed = seed
        self.auto_collation = loader.batch_sampler is not None
        self._raw: Any = loader.batch_sampler if self.auto_collation else loader.sampler
        self._inner = sampler_of(loader)
        if isinstance(self._inner, DistributedSampler):
            raise RuntimeMisuse(
                "this DataLoader already has a DistributedSampler, and prepare() would shard the data a second time. "
                "Use shuffle=True, or a sampler of the whole dataset, instead of the DistributedSampler"
            )
        self._seedable = seedable
        self.users_generator: torch.Generator | None = None
        if not seedable:
            self.users_generator = getattr(self._inner, "generator", None)
        self._shares_generator = self.users_generator is not None and self.users_generator is loader.generator
        self._persistent = bool(loader.persistent_workers)
        self._samples: SampleOrder | None = None
        self._batches: RawBatches | None = None
        self._walked: Any = None
        self._draws_from = IsolatedGenerators(seed)
        """Replaces the global generators while the sampler is read, even if it is read lazily during the epoch."""

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def length(self) -> int | None:
        """Number of units in a whole epoch; None if unknown."""
        return _length(self._inner if self.is_flat else self._raw)

    @property
    def gives_batches(self) -> bool:
        """Whether a raw batch is known to be a list of indices, not a single index."""
        return self.auto_collation or isinstance(self._raw, BatchSampler)

    @property
    def batch_size(self) -> int | None:
        return getattr(self._raw, "batch_size", None) if self.gives_batches else None

    @property
    def drop_last(self) -> bool:
        return bool(getattr(self._raw, "drop_last", False))

    @property
    def unit(self) -> str:
        """Unit of a position."""
        return "samples" if self.is_flat else "batches"

    @property
    def is_flat(self) -> bool:
        """Whether the raw batches are consecutive slices of one order of samples."""
        return getattr(type(self._raw), "__iter__", None) is BatchSampler.__iter__ and _length(self._inner) is not None

    def sampler_state(self) -> Any:
        """The state of the user's stateful sampler; None without such a sampler."""
        stateful = self.stateful
        return None if stateful is None else stateful.state_dict()

    def load_sampler_state(self, state: Any) -> None:
        stateful = self.stateful
        if stateful is not None and state is not None:
            stateful.load_state_dict(state)

    @property
    def stateful(self) -> Any:
        """The user's batch sampler or, if that has no state that can be saved, its sampler; None if neither has one."""
        for sampler in (self._raw, self._inner):
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
                return sampler
        return None

    def begin(self, epoch: int) -> None:
        """Start an epoch: draw its order, or prepare to read the order lazily if its length is unknown."""
        self.release()
        for sampler in {id(item): item for item in (self._raw, self._inner)}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if self._shares_generator and not (self._persistent and epoch):
            # A plain DataLoader draws its workers' seed from the same generator first.
            torch.empty((), dtype=torch.int64).random_(generator=self.users_generator)
        own = None
        if self.users_generator is None:
            own = torch.Generator().manual_seed(self.seed + epoch if self._seedable else mix(self.seed, epoch))
        self._draws_from = IsolatedGenerators(mix(self.seed, epoch))
        with self._draws_from:
            self._draw(own)

    def _draw(self, own: torch.Generator | None) -> None:
        known = is_known(self._inner)
        try:
            if self.is_flat:
                self._samples = draw(self._inner, own) if known else SampleOrder(listed(self._inner, len(self._inner)))
            elif (length := _length(self._raw)) is None:
                self._walked = self._raw
            elif self.gives_batches:
                self._batches = pack(self._raw, length)
            else:
                self._batches = draw(self._raw, own) if known else SampleOrder(listed(self._raw, length))
        except TooManySamples as overlong:
            walked = overlong.items
            self._walked = BatchSampler(walked, self._raw.batch_size, self.drop_last) if self.is_flat else walked

    def pass_over(self, epoch: int) -> None:
        """Advance the user's generator as a complete iteration over this epoch would."""
        self.begin(epoch)
        if self._samples is not None and self.users_generator is not None:
            self._samples.finish()
        self.release()

    def part(self, sharing: Sharing, start: int) -> RankPart:
        """The part of the current epoch that belongs to the rank of ``sharing``, from unit ``start`` on."""
        size = sharing.batch_size
        if self._samples is not None:
            finish = self._samples.finish if self.users_generator is not None else _nothing
            return SamplesPart(self._samples, sharing, start, finish)
        if self._batches is None:
            walked = self._draws_from.drawing(self._walked)
            return WalkedPart(walked, sharing, start // (size or 1) if self.is_flat else start)
        if size is None or sharing.size == 1:
            return BatchesPart(self._batches, sharing, start)
        if isinstance(self._batches, PackedIndices) and self._batches.is_uniform(size):
            return SamplesPart(self._batches.flat, sharing, start * size, _nothing)
        if sharing.split:
            return WalkedPart(self._batches, sharing, start)
        return BatchesPart(self._batches, sharing, start)

    def fingerprint(self) -> list[str]:
        """The length and some samples of this epoch's order, for comparison; empty if the order is read lazily."""
        drawn = self._samples if self._samples is not None else self._batches
        if drawn is None:
            return []
        step = max(1, len(drawn) // 16)
        return [str(len(drawn)), *(str(drawn[place]) for place in range(0, len(drawn), step))]

    def release(self) -> None:
        """Free the epoch's order."""
        self._samples = self._batches = self._walked = None


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except TypeError:
        return None


def _nothing() -> None:
    """A ``finish`` that draws nothing: the next epoch has a new generator, or the sampler has been read to its end."""
