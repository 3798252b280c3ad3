"""The process's global random generators: synchronised across ranks, and isolated while data is read.

Dropout and data augmentation draw from the same global generators. A checkpoint contains their current states, so
reading ahead of the latest batch must not draw from them.

The state of numpy's generator is copied from its memory: ``numpy.random.get_state`` and ``set_state`` convert every
word, which can take longer than reading a small batch. This memory contains only the Mersenne twister, not the normal
number that the generator may have cached. Drawing a normal number shows whether there is a cached one.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.rng.determinism import mix

__all__ = [
    "IsolatedGenerators",
    "capture",
    "check_rng_types",
    "drawn_apart",
    "generators_put_aside",
    "put_back",
    "seed_generators",
    "synchronise",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

T = TypeVar("T")


def check_rng_types(rng_types: Sequence[Any] | None) -> tuple[str, ...]:
    """The kinds of generators in ``rng_types``, by name. ``rng_types`` may contain names and members of ``RNGType``.

    Raises:
        RuntimeMisuse: a kind is unknown.
    """
    names = tuple(str(getattr(kind, "value", kind)) for kind in rng_types or ())
    for name in names:
        if name != "generator" and name not in _KINDS:
            raise RuntimeMisuse(f"unknown rng_types entry {name!r} (allowed: generator, {', '.join(_KINDS)})")
    return names


def synchronise(names: Sequence[str], group: RankGroup) -> None:
    """Set the named global generators to rank 0's state. A sampler's generator needs no communication: it was set by
    ``prepare()``, and all ranks draw the same numbers from it."""
    for name in names:
        if name != "generator" and group.world_size > 1:
            read, write = _KINDS[name]
            write(group.from_main(read()))


def synchronize_rng_states(rng_types: Sequence[Any], generator: torch.Generator | None = None) -> None:
    """Set each kind of generator to rank 0's state.

    Args:
        rng_types: ``torch``, ``numpy``, ``python``, ``generator``, and the kinds of devices, such as ``cuda``.
        generator: the generator for the kind ``"generator"``.

    Raises:
        RuntimeMisuse: a kind is unknown; ``generator`` is missing; some ranks do not take part.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """``synchronize_rng_states`` for one kind."""
    (name,) = check_rng_types([rng_type])
    group = World.current().group
    group.refuse_if_left()
    if name != "generator":
        synchronise([name], group)
    elif generator is None:
        raise RuntimeMisuse('synchronize_rng_states(["generator"]) needs a generator: pass generator=...')
    else:
        generator.set_state(group.from_main(generator.get_state(), "synchronize_rng_states"))


def seed_generators(seed: int) -> None:
    """Seed Python's generator, numpy's if it is imported, torch's on the CPU, and that of a device in use.

    Unlike ``torch.manual_seed``, this function does not defer the seeding of GPUs until CUDA is initialised.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        np.random.seed(seed % 2**32)
    if (module := device_backend.module_in_use()) is not None:
        module.manual_seed(seed)


def capture() -> list[Any]:
    """The states of Python's, numpy's and torch's generators, for ``put_back``."""
    module = device_backend.module_in_use()
    device = None if module is None else module.get_rng_state()
    return [random.getstate(), read_numpy(), torch.get_rng_state(), device]


def put_back(states: list[Any]) -> None:
    """Set the generators to captured states."""
    random.setstate(states[0])
    write_numpy(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None and (module := device_backend.module_in_use()) is not None:
        module.set_rng_state(states[3])


@contextmanager
def generators_put_aside() -> Iterator[None]:
    """Context manager that restores the states of the global generators at its end."""
    states = capture()
    try:
        yield
    finally:
        put_back(states)


class IsolatedGenerators:
    """Context manager in which the global generators have states of their own: seeded with ``seed`` at first, and
    continued from one use of the context to the next."""

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
        """The items, each read inside this context."""
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
    """Iterate over the items without changing the global generators.

    Args:
        workers: whether other processes read the items, so that in this process only creating the iterator draws random
            numbers.
        seed: if set, the generators are seeded from ``seed`` and the item's number before each item is read.
        first: number of the first item.
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


def _read_device(kind: str) -> Any:
    generator = device_backend.generator_of(kind)
    return None if generator is None else generator[0]()


def _write_device(kind: str, state: Any) -> None:
    if state is not None and (generator := device_backend.generator_of(kind)) is not None:
        generator[1](state)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (partial(_read_device, "cuda"), partial(_write_device, "cuda")),
    "numpy": (np.random.get_state, np.random.set_state),
    "python": (random.getstate, random.setstate),
    **{
        kind: (partial(_read_device, kind), partial(_write_device, kind))
        for kind in device_backend.KINDS
        if kind not in ("cpu", "cuda")
    },
}


# -- numpy -------------------------------------------------------------------------------------------------------------

_random: Any = np.random
"""Untyped: numpy's type hints lack get_bit_generator and set_bit_generator."""
_WORDS = 624
_Memory = ctypes.c_char * (4 * (_WORDS + 1))
"""Type of the generator's memory: the Mersenne twister's words, followed by the position in them."""


def read_numpy() -> Any:
    """The state of numpy's global generator, for ``write_numpy``."""
    bits: Any = _random.get_bit_generator()
    if type(bits) is not np.random.MT19937 or not _memory_layout_is_known():
        return np.random.get_state(legacy=False)
    memory = _Memory.from_address(bits.ctypes.state_address)
    state = memory.raw
    normal = np.random.standard_normal()
    if memory.raw == state:
        found = ("MT19937", np.frombuffer(state, np.uint32, _WORDS).copy(), _position(state), 1, normal)
        np.random.set_state(found)
        return found
    memory.raw = state
    _forget_normal(bits)
    return state


def write_numpy(state: Any) -> None:
    """Set numpy's global generator to a state from ``read_numpy``."""
    bits: Any = _random.get_bit_generator()
    if not isinstance(state, bytes):
        np.random.set_state(state)
    elif type(bits) is np.random.MT19937:
        _Memory.from_address(bits.ctypes.state_address).raw = state
        _forget_normal(bits)
    else:
        np.random.set_state(("MT19937", np.frombuffer(state, np.uint32, _WORDS), _position(state), 0, 0.0))


def _forget_normal(bits: Any) -> None:
    _random.set_bit_generator(bits)


def _position(state: bytes) -> int:
    return int(np.frombuffer(state, np.int32)[_WORDS])


@cache
def _memory_layout_is_known() -> bool:
    """Whether the memory of numpy's generators has the layout of ``_Memory``."""
    bits: Any = np.random.MT19937(1)
    state = bits.state["state"]
    try:
        found = _Memory.from_address(bits.ctypes.state_address).raw
    except (AttributeError, TypeError):
        return False
    return bool((np.frombuffer(found, np.uint32, _WORDS) == state["key"]).all() and _position(found) == state["pos"])
