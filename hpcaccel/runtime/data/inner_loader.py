"""The inner DataLoader of a prepared loader, created with the user's options, and the datasets that it reads."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpcaccel.runtime.data.sharding import RankPart
from hpcaccel.runtime.rng.determinism import mix
from hpcaccel.runtime.rng.generators import seed_generators
from hpcaccel.runtime.stop_flag import WorkerInit

__all__ = [
    "LoaderPlan",
    "PlannedData",
    "SeededStream",
    "has_shuffle_buffer",
    "is_stateful",
    "options_of",
    "planned_loader",
]

_OPENING = -1
"""Number that, in place of a batch number, determines the seed with which the dataset's iterator is created."""


def options_of(user: DataLoader[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The options of the user's loader, except those for batching, for a loader with another dataset or sampler."""
    found: dict[str, Any] = {
        "num_workers": user.num_workers,
        "collate_fn": user.collate_fn,
        "pin_memory": user.pin_memory,
        "timeout": user.timeout,
        "multiprocessing_context": user.multiprocessing_context,
        "generator": generator,
    }
    if user.num_workers:
        found |= {
            "worker_init_fn": UserDatasetInit(WorkerInit(user.worker_init_fn)),
            "prefetch_factor": user.prefetch_factor,
            "persistent_workers": user.persistent_workers,
        }
    if getattr(user, "pin_memory_device", ""):  # needed for devices other than CUDA until torch 2.7
        found["pin_memory_device"] = user.pin_memory_device
    if not getattr(user, "in_order", True):
        warnings.warn(
            "in_order=False is ignored: without a fixed order of batches, a resume could not restore the position",
            stacklevel=6,
        )
    return found


@dataclass(frozen=True)
class UserDatasetInit:
    """A ``worker_init_fn`` that puts the user's dataset into ``get_worker_info()``, then calls ``then``."""

    then: Callable[[int], Any]

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and hasattr(info.dataset, "users_dataset"):
            object.__setattr__(info, "dataset", info.dataset.users_dataset)
        self.then(worker_id)


def planned_loader(user: DataLoader[Any], plan: LoaderPlan, generator: torch.Generator) -> DataLoader[Any]:
    """A DataLoader that reads the user's map-style data with the user's options, and has ``plan`` as its sampler."""
    data: Any = PlannedData(user.dataset) if plan.seeded else user.dataset
    given: Any = plan
    if user.batch_sampler is not None:
        return DataLoader(data, batch_sampler=given, **options_of(user, generator))
    return DataLoader(data, batch_size=None, sampler=given, **options_of(user, generator))


class LoaderPlan:
    """The sampler or batch sampler of the inner loader. Yields indices, or (seed, position, indices) if ``seeded``.

    Args:
        seeded: whether batches are read ahead, by workers or by the rank that reads for all ranks.
    """

    def __init__(self, *, seeded: bool) -> None:
        self.seeded = seeded
        self._part: RankPart | None = None
        self._seed = self._first = self._step = 0
        self._before: Any = None

    def begin(self, part: RankPart, *, seed: int, first: int, step: int, before: Any = None) -> None:
        """Start an iteration, with this rank's batches at positions ``first``, ``first + step`` and so on.

        Args:
            before: indices of the epoch's first batch, if that batch is to be read again before the part's batches.
        """
        self._part, self._seed, self._first, self._step = part, seed, first, step
        self._before = before

    def release(self) -> None:
        """End the iteration."""
        self._part = None

    def __iter__(self) -> Iterator[Any]:
        assert self._part is not None
        return self._with_seeds(self._part) if self.seeded else iter(self._part)

    def _with_seeds(self, part: RankPart) -> Iterator[tuple[int, int, Any]]:
        seed, position, step = self._seed, self._first, self._step
        if self._before is not None:
            yield seed, 0, self._before
        for indices in part:
            yield seed, position, indices
            position += step


class PlannedData:
    """The user's dataset, indexed with (seed, position, indices).

    The global generators are seeded before each batch, so that after a resume new worker processes augment the data
    with the same random numbers.
    """

    def __init__(self, dataset: Any) -> None:
        self.users_dataset = dataset

    def __getitems__(self, planned: tuple[int, int, Any]) -> Any:
        indices = _seed_for(planned)
        if getattr(self.users_dataset, "__getitems__", None):
            return self.users_dataset.__getitems__(indices)
        return [self.users_dataset[index] for index in indices]

    def __getitem__(self, planned: tuple[int, int, Any]) -> Any:
        return self.users_dataset[_seed_for(planned)]


def _seed_for(planned: tuple[int, int, Any]) -> Any:
    start, position, indices = planned
    seed_generators(mix(start, position))
    return indices


def is_stateful(thing: Any) -> bool:
    """Whether ``thing`` can continue at a saved state."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") and not has_shuffle_buffer(thing)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether this is a stream of the package datasets that shuffles its samples in a buffer.

    The state of such a stream does not contain the buffer (datasets 5.2, ``IterableDataset.state_dict``): a stream that
    continues at a saved state leaves out the samples that were in the buffer.
    """
    module: Any = sys.modules.get("datasets.iterable_dataset")
    return module is not None and isinstance(dataset, module.IterableDataset) and _shuffles(dataset._ex_iterable)


def _shuffles(part: Any) -> bool:
    """Whether a part of a stream of datasets, or a part inside it, has a buffer of several samples."""
    inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return getattr(part, "buffer_size", 1) > 1 or any(_shuffles(one) for one in inner if one is not None)


class SeededStream(IterableDataset[Any]):
    """The user's iterable dataset. The global generators are seeded again before each group of ``every`` samples.

    Args:
        every: number of samples that are read with the same seed, for example the batch size.
        workers: whether worker processes read the stream. If so, the seed is in shared memory, so that persistent
            workers get the seed of each epoch.
    """

    def __init__(self, dataset: Any, *, every: int, workers: bool) -> None:
        self.users_dataset = dataset
        self.every = every
        self.given = 0
        """Number of samples that the dataset had returned when its restored state was saved."""
        self._seed = torch.zeros((), dtype=torch.int64)
        if workers:
            self._seed.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, *, given: int = 0) -> None:
        """Set the seed and ``given`` for the next iteration."""
        self._seed.fill_(seed)
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        seed = mix(int(self._seed), 0 if worker is None else worker.id + 1)
        if is_stateful(self.users_dataset):
            return StatefulIteration(self, seed)  # the dataset's state must be loaded before the dataset is iterated
        samples = SeededIteration(self, seed)
        samples.open()
        if is_stateful(samples.iterator):
            return StatefulIteration(self, seed, samples.iterator)
        return samples


class SeededIteration:
    """One iteration over a ``SeededStream``."""

    def __init__(self, stream: SeededStream, seed: int, iterator: Any = None) -> None:
        self.iterator = iterator
        self._dataset, self._every = stream.users_dataset, stream.every
        self._seed, self._given = seed, stream.given
        self._is_seeded = False

    def open(self) -> None:
        seed_generators(mix(self._seed, _OPENING))
        self.iterator = iter(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.iterator is None:
            self.open()
        if not self._is_seeded or self._given % self._every == 0:
            seed_generators(mix(self._seed, self._given // self._every))
            self._is_seeded = True
        sample = next(self.iterator)
        self._given += 1
        return sample


class StatefulIteration(SeededIteration):
    """An iteration whose position can be saved, because the dataset or its iterator has a state."""

    def state_dict(self) -> dict[str, Any]:
        if self.iterator is None:
            self.open()  # before that, the dataset may still have its state from the end of the previous epoch
        return {
            "given": self._given,
            "dataset": self._dataset.state_dict() if is_stateful(self._dataset) else None,
            "iterator": self.iterator.state_dict() if is_stateful(self.iterator) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given, self._is_seeded = state["given"], False
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
            self.iterator = None
        if state["iterator"] is not None:
            if self.iterator is None:
                self.open()
            self.iterator.load_state_dict(state["iterator"])
