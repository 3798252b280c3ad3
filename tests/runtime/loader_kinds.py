"""Every kind of loader that can be prepared, over data that draws from all global random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

__all__ = ["KINDS", "Kind"]

SAMPLES = 23
BATCH_SIZE = 2


def noisy(number: int) -> torch.Tensor:
    """Sample ``number``, with noise from each global random generator."""
    noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return torch.tensor([float(number), *noise], dtype=torch.float64)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()).item()


class Map(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return noisy(index)


class Pairs(BatchSampler):
    """Batches of two neighbouring samples, in random order."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), BATCH_SIZE, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, SAMPLES - 1, 2))
        random.shuffle(starts)
        return ([start, start + 1] for start in starts)


class OverRandom:
    """A batch sampler without a length, which draws during iteration, over one that draws when iteration begins."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(RandomSampler(range(SAMPLES - 1)))
        for first in batches:
            pair = [first, next(batches)]
            yield pair if random.random() < 0.5 else pair[::-1]


class Triples:
    """An odd number of batches of three, in random order and without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, SAMPLES - 2, 3))
        random.shuffle(starts)
        for start in starts:
            yield random.sample([start, start + 1, start + 2], 3)


class LeftOver:
    """Batches of two, in random order and without a length. The last batch has a single sample."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(RandomSampler(range(SAMPLES)))
        yield from (order[start : start + 2] for start in range(0, SAMPLES, 2))


class Sorted(BatchSampler):
    """Sorted batches of a sampler that draws when iteration begins."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(SAMPLES)), BATCH_SIZE, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return (sorted(batch) for batch in super().__iter__())


class Shuffled(IterableDataset[torch.Tensor]):
    """A stream split among workers and shuffled through a buffer."""

    def places(self) -> list[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return list(range(first, SAMPLES, step))

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        offset = float(np.random.rand())
        for place in self.places():
            buffer.append(place)
            if len(buffer) > 4:
                yield noisy(buffer.pop(random.randrange(len(buffer)))) + offset
        for place in buffer:
            yield noisy(place)


class Drawing(Shuffled):
    """A stream that also draws from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in super().__iter__():
            yield sample + torch.rand((), generator=self.generator).item()


class Stateful(Shuffled):
    """A stream with ``state_dict()``, which contains its position in each worker."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        places = self.places()
        while self.place < len(places):
            self.place += 1
            yield noisy(places[self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class StatefulDrawing(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in super().__iter__():
            yield sample + torch.rand((), generator=self.generator).item()


class StatefulIterator(Shuffled):
    """A stream whose iterator has ``state_dict()``."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return Walk(self.places())


class Walk:
    def __init__(self, places: list[int]) -> None:
        self._places, self._place = places, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self._place == len(self._places):
            raise StopIteration
        self._place += 1
        return noisy(self._places[self._place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


class OwnLoader(DataLoader[Any]):
    """A loader of a user's class, with ``state_dict()``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.given = self.start = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self.start = self.start, 0
        self.given = 0
        for number in range(SAMPLES // BATCH_SIZE):
            self.given = number + 1
            if number >= start:
                yield collate([noisy(number), noisy(number)])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]


@dataclass(frozen=True)
class Kind:
    """
    Args:
        dataset: creates the dataset.
        loader: options of the DataLoader.
        options: options of the prepared loader.
        own_class: the loader's class if it is not torch's: ``torchdata``, or ``another`` for ``OwnLoader``.
    """

    dataset: Callable[[], Any]
    loader: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    own_class: str = ""

    def make(self) -> DataLoader[Any]:
        options = {name: value() if callable(value) else value for name, value in self.loader.items()}
        if "batch_sampler" not in options:
            options["batch_size"] = BATCH_SIZE
        made: Any = DataLoader
        if self.own_class == "torchdata":
            from torchdata.stateful_dataloader import StatefulDataLoader

            made = StatefulDataLoader
        elif self.own_class:
            made = OwnLoader
        loader: DataLoader[Any] = made(self.dataset(), collate_fn=collate, **options)
        return loader


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


_TWO = {"num_workers": 2}
_STAYING = _TWO | {"persistent_workers": True}
_ASKED = {"stateful": True}

KINDS: dict[str, Kind] = {
    "map": Kind(Map, {"shuffle": True}),
    "map, own generator": Kind(Map, {"shuffle": True, "generator": _generator}),
    "map, 2 workers": Kind(Map, _TWO | {"shuffle": True}),
    "map, persistent": Kind(Map, _STAYING | {"shuffle": True}),
    "map, own batches": Kind(Map, {"batch_sampler": Pairs}),
    "map, batches of a random sampler": Kind(Map, {"batch_sampler": Sorted}),
    "map, walked": Kind(Map, {"batch_sampler": OverRandom}),
    "map, walked, 2 workers": Kind(Map, _TWO | {"batch_sampler": OverRandom}),
    "map, walked, triples": Kind(Map, {"batch_sampler": Triples}),
    "map, walked, a sample left over": Kind(Map, {"batch_sampler": LeftOver}),
    "map, split": Kind(Map, {"shuffle": True}, {"split_batches": True}),
    "map, torchdata": Kind(Map, {"shuffle": True}, own_class="torchdata"),
    "stream": Kind(Shuffled),
    "stream, 1 worker": Kind(Shuffled, {"num_workers": 1}),
    "stream, 2 workers": Kind(Shuffled, _TWO),
    "stream, persistent": Kind(Shuffled, _STAYING),
    "stream, own generator": Kind(Drawing),
    "stream, uneven": Kind(Shuffled, {}, {"even_batches": False}),
    "stateful": Kind(Stateful),
    "stateful, own generator": Kind(StatefulDrawing),
    "stateful, 2 workers": Kind(Stateful, _TWO),
    "torchdata": Kind(Stateful, {}, _ASKED),
    "torchdata, 2 workers": Kind(Stateful, _TWO, _ASKED),
    "torchdata, persistent": Kind(Stateful, _STAYING, _ASKED),
    "torchdata, stateless": Kind(Shuffled, {}, _ASKED),
    "torchdata, stateless, 2 workers": Kind(Shuffled, _TWO, _ASKED),
    "torchdata, iterator": Kind(StatefulIterator, {}, _ASKED),
    "torchdata, iterator, 2 workers": Kind(StatefulIterator, _TWO, _ASKED),
    "torchdata's own": Kind(Stateful, {}, own_class="torchdata"),
    "torchdata's own, 2 workers": Kind(Stateful, _TWO, own_class="torchdata"),
    "another's own": Kind(Shuffled, {}, own_class="another"),
}
