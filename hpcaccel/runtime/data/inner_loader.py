"""The DataLoader inside of a prepared one: it reads what the plan says, as the user's own would."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from hpcaccel.runtime.data.generators import seed_generators
from hpcaccel.runtime.data.sharding import Part
from hpcaccel.runtime.training.determinism import mix
from hpcaccel.runtime.training.stop_agreement import WorkerInit

__all__ = ["Plan", "PlannedData", "options_of", "planned_loader"]


def options_of(user: DataLoader[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """What a loader of other data takes over from the user's."""
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
            "worker_init_fn": WorkerStart(WorkerInit(user.worker_init_fn)),
            "prefetch_factor": user.prefetch_factor,
            "persistent_workers": user.persistent_workers,
        }
    if not getattr(user, "in_order", True):
        warnings.warn(
            "in_order=False is passed over: batches that come in any order could not be found again after a resume",
            stacklevel=6,
        )
    return found


@dataclass(frozen=True)
class WorkerStart:
    """A worker's start; the user's own ``worker_init_fn`` finds the user's own dataset."""

    then: Callable[[int], Any]

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and hasattr(info.dataset, "users_dataset"):
            object.__setattr__(info, "dataset", info.dataset.users_dataset)
        self.then(worker_id)


def planned_loader(user: DataLoader[Any], plan: Plan, generator: torch.Generator) -> DataLoader[Any]:
    """The user's loader of map-style data, with ``plan`` for a sampler."""
    data: Any = PlannedData(user.dataset) if plan.seeded else user.dataset
    given: Any = plan
    if user.batch_sampler is not None:
        return DataLoader(data, batch_sampler=given, **options_of(user, generator))
    return DataLoader(data, batch_size=None, sampler=given, **options_of(user, generator))


class Plan:
    """The indices that the inner loader fetches. What is read ahead comes batch by batch with what its seed is made of.

    Args:
        seeded: batches are read before they are handed out: by workers, or by the rank that reads for all.
    """

    def __init__(self, *, seeded: bool) -> None:
        self.seeded = seeded
        self._part: Part | None = None
        self._seed = self._first = self._step = 0
        self._before: Any = None

    def begin(self, part: Part, *, seed: int, first: int, step: int, before: Any = None) -> None:
        """An iteration begins at position ``first``; the next batch of this rank is ``step`` away.

        Args:
            before: the indices of the epoch's first batch, to be read once more before the others.
        """
        self._part, self._seed, self._first, self._step = part, seed, first, step
        self._before = before

    def release(self) -> None:
        """The iteration is over."""
        self._part = None

    def __iter__(self) -> Iterator[Any]:
        assert self._part is not None
        return self._with_seeds(self._part) if self.seeded else iter(self._part)

    def _with_seeds(self, part: Part) -> Iterator[tuple[int, int, Any]]:
        seed, position, step = self._seed, self._first, self._step
        if self._before is not None:
            yield seed, 0, self._before
        for indices in part:
            yield seed, position, indices
            position += step


class PlannedData:
    """The user's dataset, asked with the indices of a planned batch, and with its seed: a worker's generators start
    anew with each epoch and each resume, and random augmentation is to be the same after it."""

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
