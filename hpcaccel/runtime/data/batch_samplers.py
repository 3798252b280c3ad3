"""Samplers for training scripts: for a seeded random order, for one rank's batches, and for skipping first batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loader_base import LoaderFacts
from hpcaccel.runtime.data.sample_order import draw, is_known
from hpcaccel.runtime.data.sharding import Sharing, WalkedPart

__all__ = [
    "BatchSamplerShard",
    "LoaderShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "seedable_order",
    "skip_first_batches",
]


class SeedableRandomSampler(RandomSampler):
    """A random order that depends only on a seed and the epoch's number.

    Args:
        data_seed: the seed. The order of epoch e is drawn with the seed ``data_seed + e``. The default is torch's
            current initial seed.
        args, kwargs: arguments of ``RandomSampler``. A ``generator`` is seeded again in each epoch.
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
    """One rank's batches of a batch sampler that every rank iterates over.

    Args:
        split_batches: whether to divide each batch among the ranks, instead of assigning whole batches.
        even_batches: whether to fill up an incomplete last round with the first samples, so that all ranks get the same
            number of batches.

    Raises:
        RuntimeMisuse: there are several processes, and ``split_batches`` or ``even_batches`` is set although the
            sampler has no batch size, or ``split_batches`` is set although the batch size is not a multiple of
            ``num_processes``.
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
                "BatchSamplerShard(even_batches=True) fills the last batches up to the batch size, but "
                f"{type(batch_sampler).__name__} has no batch_size. Pass even_batches=False"
            )
        self._sharing  # noqa: B018  (raises if batches cannot be divided)

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
        """Number of batches in the whole batch sampler, for all ranks together."""
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


class ShardedLoader(Protocol):
    """The part of a prepared loader that its batch sampler uses."""

    even_batches: bool

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...


class LoaderShard(BatchSamplerShard):
    """The batch sampler of a prepared loader, with the loader's length, epoch and ``even_batches``."""

    def __init__(self, loader: ShardedLoader, batch_sampler: Any, sharing: Sharing) -> None:
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
    """If ``batch_sampler`` is a plain ``BatchSampler`` of a ``RandomSampler``, a copy that uses a
    ``SeedableRandomSampler`` instead; otherwise ``batch_sampler`` itself."""
    inner = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or type(inner) is not RandomSampler:
        return batch_sampler
    # _num_samples is the constructor's argument and may be None, whereas num_samples is always a number.
    sampler = SeedableRandomSampler(inner.data_source, inner.replacement, inner._num_samples, data_seed=seed)
    sampler.set_epoch(epoch)
    return BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that skips the first batches of every iteration.

    The skipped samples of map-style data are not read, except to fill up the last round of a prepared loader. The
    skipped samples of an iterable dataset are read and discarded. If ``dataloader`` is a prepared loader, the result is
    a view with the same epochs. In an epoch that a resume continues, the view starts at the checkpoint's position and
    skips nothing.

    Args:
        num_batches: how many of this rank's batches to skip.

    Raises:
        RuntimeMisuse: ``num_batches`` is negative, or ``dataloader`` is not a DataLoader.

    Example::

        for batch in hpcaccel.skip_first_batches(loader, 2):  # begins with the third batch
            ...
    """
    if not isinstance(dataloader, DataLoader):
        raise RuntimeMisuse(f"skip_first_batches() takes a DataLoader, not {type(dataloader).__name__}")
    if num_batches < 0:
        raise RuntimeMisuse(f"skip_first_batches(num_batches={num_batches}): num_batches must be at least 0")
    if isinstance(dataloader, LoaderFacts):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader, _SkippingLoader):
        return _SkippingLoader(dataloader.whole, dataloader.skipped + num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return _SkippingLoader(dataloader, num_batches)
    return _without(dataloader, num_batches)


def _without(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    }
    options["multiprocessing_context"] = loader.multiprocessing_context
    options["in_order"] = getattr(loader, "in_order", True)
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    if loader.batch_sampler is None:
        sampler: Any = SkipBatchSampler(loader.sampler, count)
        return DataLoader(loader.dataset, batch_size=None, sampler=sampler, **options)
    return DataLoader(loader.dataset, batch_sampler=SkipBatchSampler(loader.batch_sampler, count), **options)


class SkipBatchSampler(Sampler[Any]):
    """A batch sampler (or sampler) without its first ``skip_batches`` items, in the same order."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        batches = self.batch_sampler
        if type(batches) is BatchSampler and is_known(batches.sampler):
            return self._drawn(batches)
        return islice(iter(batches), self.skip_batches, None)

    def _drawn(self, batches: BatchSampler) -> Iterator[list[int]]:
        samples = draw(batches.sampler)
        size = batches.batch_size
        end = len(samples) - len(samples) % size if batches.drop_last else len(samples)
        for begin in range(self.skip_batches * size, end, size):
            yield samples.slice(begin, begin + size)
        samples.finish()


class _SkippingLoader(DataLoader[Any]):
    """A loader that reads a stream from the beginning, and discards the first batches."""

    def __init__(self, whole: DataLoader[Any], skipped: int) -> None:
        self.__dict__.update(whole.__dict__)
        self.whole = whole
        self.skipped = skipped

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return max(len(self.whole) - self.skipped, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(iter(self.whole), self.skipped, None)
