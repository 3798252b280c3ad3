"""The process's random generators: made alike on all ranks, or put aside while data is read.

The model's dropout draws from the same global generators as the data's augmentation. A checkpoint holds them as they
are when it is made, so whatever is read ahead of the batch that was handed out last must not draw from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.numpy_state import read_numpy, write_numpy
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.training.determinism import mix

__all__ = [
    "OwnGenerators",
    "capture",
    "check_rng_types",
    "drawn_apart",
    "generators_put_aside",
    "put_back",
    "seed_generators",
    "synchronise",
]

T = TypeVar("T")


def check_rng_types(rng_types: Sequence[Any] | None) -> tuple[str, ...]:
    """The kinds' names; they may be given as enums.

    Raises:
        RuntimeMisuse: one that is not known.
    """
    names = tuple(str(getattr(kind, "value", kind)) for kind in rng_types or ())
    for name in names:
        if name != "generator" and name not in _KINDS:
            raise RuntimeMisuse(
                f"rng_types holds {name!r}, which is not known (any of: generator, {', '.join(_KINDS)})"
            )
    return names


def synchronise(names: Sequence[str], group: Group) -> None:
    """Set the global generators so named to the state of rank 0's. A sampler's own generator needs no communication:
    it was set when it was prepared, and all ranks draw from it alike."""
    for name in names:
        if name != "generator" and group.world_size > 1:
            read, write = _KINDS[name]
            write(group.from_main(read()))


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's (where it is imported), torch's CPU generator, and the current GPU's where one is in use.

    Unlike ``torch.manual_seed`` it leaves nothing to be done when CUDA is initialised later.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        np.random.seed(seed % 2**32)
    if _has_cuda():
        torch.cuda.manual_seed(seed)


def _has_cuda() -> bool:
    """Whether this process has begun to use a GPU; a worker forked from it has not."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def capture() -> list[Any]:
    """The states of these generators, for ``put_back``."""
    cuda = torch.cuda.get_rng_state() if _has_cuda() else None
    return [random.getstate(), read_numpy(), torch.get_rng_state(), cuda]


def put_back(states: list[Any]) -> None:
    """Set the generators to captured states."""
    random.setstate(states[0])
    write_numpy(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3])


@contextmanager
def generators_put_aside() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the generators are as before afterwards."""
    states = capture()
    try:
        yield
    finally:
        put_back(states)


class OwnGenerators:
    """A context in which the global generators go on from states of their own, which begin at ``seed``."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._own: list[Any] = []
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer = capture()
        if self._seed is None:
            put_back(self._own)
        else:
            seed_generators(self._seed)
            self._seed = None

    def __exit__(self, *error: object) -> None:
        self._own = capture()
        put_back(self._outer)

    def drawing(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each one drawn inside this context."""
        with self:
            iterator = iter(items)
        while True:
            with self:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


def drawn_apart(items: Iterable[T], *, workers: bool = False, seed: int | None = None, first: int = 0) -> Iterator[T]:
    """The items, begun and read while the generators are put aside.

    Args:
        workers: other processes read them, so that nothing is drawn here but when they are begun.
        seed: the generators are seeded from this and the item's number before it is read; None: the items see to
            their seeds themselves.
        first: the number of the first item.
    """
    with generators_put_aside():
        iterator = iter(items)
    return iterator if workers else _drawn_apart(iterator, seed, first)


def _drawn_apart(iterator: Iterator[T], seed: int | None, number: int) -> Iterator[T]:
    while True:
        with generators_put_aside():
            if seed is not None:
                seed_generators(mix(seed, number))
            try:
                item = next(iterator)
            except StopIteration:
                return
        number += 1
        yield item


def _read_cuda() -> Any:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _write_cuda(state: Any) -> None:
    if state is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (_read_cuda, _write_cuda),
    "numpy": (np.random.get_state, np.random.set_state),
    "python": (random.getstate, random.setstate),
}
