"""A stream whose reading draws the same numbers wherever it is begun: seeded anew every few samples, by their place.

Workers start with generators of their own, and a stream that is taken up in the middle has not drawn what came before.
So the seed is made of the epoch, the worker and the place in the stream, as that of a map-style batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hpcaccel.runtime.data.generators import seed_generators
from hpcaccel.runtime.training.determinism import mix

__all__ = ["SeededStream", "is_stateful"]

_OPENING = -1


def is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class SeededStream(IterableDataset[Any]):
    """
    Args:
        every: how many samples are read with one seed, those of a batch say.
        workers: whether worker processes read it. Those that persist must see the seed of each epoch.
    """

    def __init__(self, dataset: Any, *, every: int, workers: bool) -> None:
        self.users_dataset = dataset
        self.every = every
        self.given = 0
        """Samples that the dataset has given before, and does not give again."""
        self._seed = torch.zeros((), dtype=torch.int64)
        if workers:
            self._seed.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, *, given: int = 0) -> None:
        """The next iteration draws what follows from ``seed``."""
        self._seed.fill_(seed)
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        seed = mix(int(self._seed), 0 if worker is None else worker.id + 1)
        if is_stateful(self.users_dataset):
            return StatefulSamples(self, seed)  # its state must be loaded before it is iterated
        samples = Samples(self, seed)
        samples.open()
        if is_stateful(samples.iterator):
            return StatefulSamples(self, seed, samples.iterator)
        return samples


class Samples:
    """One iteration of the stream."""

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


class StatefulSamples(Samples):
    """One whose place can be stored, because the dataset's or its iterator's can."""

    def state_dict(self) -> dict[str, Any]:
        if self.iterator is None:
            self.open()  # what the dataset tells before that may be the end of the epoch before
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
