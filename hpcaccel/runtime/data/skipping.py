"""Leaving out the first batches of a loader, without reading them where that can be avoided."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.data.sample_order import draw, is_known

__all__ = ["SkipBatchSampler", "skip_first_batches"]


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that leaves out the first batches of every iteration.

    Of map-style data nothing that is left out is read, nor are indices walked through, unless the sampler is the
    user's own. A prepared loader keeps counting its epochs through the one that comes back.

    Args:
        num_batches: batches of this rank.

    Raises:
        RuntimeMisuse: a negative number of batches, or no DataLoader.
    """
    if not isinstance(dataloader, DataLoader):
        raise RuntimeMisuse(f"skip_first_batches() takes a DataLoader, not {type(dataloader).__name__}")
    if num_batches < 0:
        raise RuntimeMisuse(f"skip_first_batches(num_batches={num_batches}): it must be at least 0")
    if isinstance(dataloader, PreparedLoader):
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
    """A batch sampler (or a sampler) without the first ``skip_batches`` of what it gives; its order is the same."""

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
    """A face for a loader of a stream, which can only be read from its beginning."""

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
