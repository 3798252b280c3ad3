"""The order of the samples: the user's own sampler decides it, once an epoch, alike on every rank.

A position in an epoch is the number of samples (of batches, where they differ in size) that all ranks together have
used: it means the same to another number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.generators import OwnGenerators
from hpcaccel.runtime.data.sample_order import Overlong, Packed, Samples, draw, is_known, listed, pack
from hpcaccel.runtime.data.sharding import Batches, BatchesPart, Part, SamplesPart, Sharing, WalkedPart
from hpcaccel.runtime.training.determinism import mix

__all__ = ["Order", "sampler_of"]


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides over single samples: the sampler inside of the batch sampler, where there is one."""
    raw: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return getattr(raw, "sampler", raw)


class Order:
    """The raw batches of a map-style loader, epoch by epoch.

    A sampler that draws from a generator of the user's keeps doing so, as in a loop of one process. One that would draw
    from the global generators, which differ by rank, draws from a seed of its own and the epoch's number.

    Args:
        seedable: the order is a function of (seed, epoch) also where the sampler has a generator of the user's, and
            that of a generator seeded with their sum.

    Raises:
        RuntimeMisuse: the loader is sharded already.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, seedable: bool = False) -> None:
        self.seed = seed
        self.auto_collation = loader.batch_sampler is not None
        self._raw: Any = loader.batch_sampler if self.auto_collation else loader.sampler
        self._inner = sampler_of(loader)
        if isinstance(self._inner, DistributedSampler):
            raise RuntimeMisuse(
                "this DataLoader has a DistributedSampler, and prepare() shards too: each rank would see a part of a "
                "part. Give the DataLoader shuffle=True (or your own sampler of the whole data) instead"
            )
        self._seedable = seedable
        self.users_generator: torch.Generator | None = None
        if not seedable:
            self.users_generator = getattr(self._inner, "generator", None)
        self._shares_generator = self.users_generator is not None and self.users_generator is loader.generator
        self._persistent = bool(loader.persistent_workers)
        self._samples: Samples | None = None
        self._batches: Batches | None = None
        self._walked: Any = None
        self._draws_from = OwnGenerators(seed)
        """In place of the global generators, also for what is drawn one by one while the epoch goes on."""

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def length(self) -> int | None:
        """Units of a whole epoch, where they are known."""
        return _length(self._inner if self.is_flat else self._raw)

    @property
    def gives_batches(self) -> bool:
        """Whether raw batches are lists of indices, and not single ones."""
        return self.auto_collation or isinstance(self._raw, BatchSampler)

    @property
    def batch_size(self) -> int | None:
        return getattr(self._raw, "batch_size", None) if self.gives_batches else None

    @property
    def drop_last(self) -> bool:
        return bool(getattr(self._raw, "drop_last", False))

    @property
    def unit(self) -> str:
        """What a position counts."""
        return "samples" if self.is_flat else "batches"

    @property
    def is_flat(self) -> bool:
        """Whether the raw batches are slices of one order of samples."""
        return getattr(type(self._raw), "__iter__", None) is BatchSampler.__iter__ and _length(self._inner) is not None

    def sampler_state(self) -> Any:
        """The state of a sampler of the user's that has one, None of others."""
        stateful = self.stateful
        return None if stateful is None else stateful.state_dict()

    def load_sampler_state(self, state: Any) -> None:
        stateful = self.stateful
        if stateful is not None and state is not None:
            stateful.load_state_dict(state)

    @property
    def stateful(self) -> Any:
        """A sampler of the user's whose state is saved, None without one."""
        for sampler in (self._raw, self._inner):
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
                return sampler
        return None

    def begin(self, epoch: int) -> None:
        """Draw the order of an epoch, before each iteration of it."""
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
        self._draws_from = OwnGenerators(mix(self.seed, epoch))
        with self._draws_from:
            self._draw(own)

    def _draw(self, own: torch.Generator | None) -> None:
        known = is_known(self._inner)
        try:
            if self.is_flat:
                self._samples = draw(self._inner, own) if known else Samples(listed(self._inner, len(self._inner)))
            elif (length := _length(self._raw)) is None:
                self._walked = self._raw
            elif self.gives_batches:
                self._batches = pack(self._raw, length)
            else:
                self._batches = draw(self._raw, own) if known else Samples(listed(self._raw, length))
        except Overlong as overlong:
            walked = overlong.items
            self._walked = BatchSampler(walked, self._raw.batch_size, self.drop_last) if self.is_flat else walked

    def pass_over(self, epoch: int) -> None:
        """Bring the generator to where it is when this epoch has been read to its end."""
        self.begin(epoch)
        if self._samples is not None and self.users_generator is not None:
            self._samples.finish()
        self.release()

    def part(self, sharing: Sharing, start: int) -> Part:
        """A rank's part of the epoch that has begun, from ``start`` units on."""
        size = sharing.batch_size
        if self._samples is not None:
            finish = self._samples.finish if self.users_generator is not None else _nothing
            return SamplesPart(self._samples, sharing, start, finish)
        if self._batches is None:
            walked = self._draws_from.drawing(self._walked)
            return WalkedPart(walked, sharing, start // (size or 1) if self.is_flat else start)
        if size is None or sharing.size == 1:
            return BatchesPart(self._batches, sharing, start)
        if isinstance(self._batches, Packed) and self._batches.is_uniform(size):
            return SamplesPart(self._batches.flat, sharing, start * size, _nothing)
        if sharing.split:
            return WalkedPart(self._batches, sharing, start)
        return BatchesPart(self._batches, sharing, start)

    def fingerprint(self) -> list[str]:
        """A few samples that tell this epoch's order from others; nothing where nobody knows it in advance."""
        drawn = self._samples if self._samples is not None else self._batches
        if drawn is None:
            return []
        step = max(1, len(drawn) // 16)
        return [str(len(drawn)), *(str(drawn[place]) for place in range(0, len(drawn), step))]

    def release(self) -> None:
        """Forget the epoch's order."""
        self._samples = self._batches = self._walked = None


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except TypeError:
        return None


def _nothing() -> None:
    """What is drawn at the end of an epoch from a generator that starts anew with the next one."""
