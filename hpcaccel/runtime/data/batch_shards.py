"""Batch samplers as the ranks see them: what scripts find as ``batch_sampler`` of a prepared loader, and may use
alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sharding import Sharing, WalkedPart

if TYPE_CHECKING:
    from hpcaccel.runtime.data.loader import PreparedLoader

__all__ = ["BatchSamplerShard", "LoaderShard", "SeedableRandomSampler", "seedable_order"]


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of a seed and the epoch's number, whatever else draws.

    Args:
        data_seed: default: torch's initial seed at the moment.
        args, kwargs: as ``RandomSampler``'s; of a ``generator`` only the place counts.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class BatchSamplerShard(Sampler[Any]):
    """One rank's batches of a batch sampler, which every rank walks through.

    Args:
        split_batches: the batches are divided among the ranks, instead of each rank getting whole ones.
        even_batches: the first samples fill up the last round, so that all ranks get equally many full batches.

    Raises:
        RuntimeMisuse: batches that are to be divided and cannot be; even batches of a sampler without a batch size.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if self.batch_size is None and even_batches and num_processes > 1:
            raise RuntimeMisuse(
                f"BatchSamplerShard(even_batches=True): {type(batch_sampler).__name__} has no batch_size to fill the "
                "last batches up to. Pass even_batches=False"
            )
        self._sharing  # noqa: B018  (refuses batches that cannot be divided)

    @property
    def _sharing(self) -> Sharing:
        return Sharing(
            rank=self.process_index,
            size=self.num_processes,
            batch_size=self.batch_size,
            even=self.even_batches,
            split=self.split_batches,
            drop_last=self.drop_last,
        )

    @property
    def total_length(self) -> int:
        """Batches of all ranks."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        for sampler in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __len__(self) -> int:
        sharing = self._sharing
        flat: Any = getattr(self.batch_sampler, "sampler", None)
        if type(self.batch_sampler) is BatchSampler and hasattr(flat, "__len__"):
            assert sharing.round is not None
            assert sharing.width is not None
            return sharing.count(len(flat), sharing.round, sharing.width)
        return sharing.count(len(self.batch_sampler), sharing.raw, 1)

    def __iter__(self) -> Iterator[Any]:
        return iter(WalkedPart(self.batch_sampler, self._sharing, 0))


class LoaderShard(BatchSamplerShard):
    """The same, of a prepared loader, which it follows and sets."""

    def __init__(self, loader: PreparedLoader, batch_sampler: Any, sharing: Sharing) -> None:
        self._loader = loader
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = sharing.size, sharing.rank
        self.split_batches = sharing.split
        self.batch_size, self.drop_last = sharing.batch_size, sharing.drop_last

    @property
    def even_batches(self) -> bool:
        return self._loader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._loader.even_batches = value

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)


def seedable_order(batch_sampler: Any, seed: int, epoch: int) -> Any:
    """The batch sampler with the order that its prepared loader has where that is a function of seed and epoch."""
    inner = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or type(inner) is not RandomSampler:
        return batch_sampler
    # RandomSampler keeps the number it was given, None included, under another name.
    sampler = SeedableRandomSampler(inner.data_source, inner.replacement, inner._num_samples, data_seed=seed)
    sampler.set_epoch(epoch)
    return BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
