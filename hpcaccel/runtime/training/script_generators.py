"""Random generators of the script's own, which no checkpoint holds: found in its variables and in its datasets.

One that is never drawn from while the training runs does no harm (it split the dataset, say), so their states are
compared with those at the beginning. Workers draw from copies, which cannot be looked at.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

__all__ = ["OwnGenerators", "generators_in"]

_DEPTH = 4
_MOST_ITEMS = 32
"""Longer lists and dicts hold data, and not the parts that a dataset is made of."""


class OwnGenerators:
    """Those that the script can reach, each with its state at the first look."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, str]] = {}

    def look(self, datasets: Mapping[str, Any], known: Iterable[Any]) -> list[str]:
        """The names of those that were drawn from since they were first seen.

        Args:
            datasets: what is looked into besides the script's variables, by name.
            known: generators that the checkpoint holds, and objects that it holds with all that is in them.
        """
        saved = {id(item) for thing in known for item in (thing, *(found for _, found in generators_in(thing, "")))}
        moved = []
        for name, generator in {**dict(_variables()), **_within(datasets)}.items():
            if id(generator) in saved:
                continue
            state = _digest(generator)
            before = self._seen.get(name)
            if before is None or before[0] is not generator:
                self._seen[name] = generator, state  # holding it, for its address tells it from others
            elif before[1] != state:
                moved.append(name)
        return moved


def _within(datasets: Mapping[str, Any]) -> dict[str, Any]:
    return dict(pair for name, thing in datasets.items() for pair in generators_in(thing, name))


def _variables() -> Iterator[tuple[str, Any]]:
    """Generators among the variables of the functions that the script is in now, and of the script itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame):
            own = frame.f_locals
            yield from _among(own, "")
            if "self" in own:
                yield from _among(getattr(own["self"], "__dict__", {}), "self.")
        frame = frame.f_back
    yield from _among(vars(sys.modules["__main__"]), "")


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("hpcaccel", "torch", "runpy", "importlib")


def _among(variables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}{name}", value) for name, value in list(variables.items()) if _is_generator(value))


def generators_in(thing: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The generators that an object holds, its parts' included, each with the way to it."""
    if _is_generator(thing):
        yield name, thing
        return
    if depth == 0 or isinstance(thing, torch.Tensor | nn.Module | type | str | bytes | int | float):
        return
    for part, value in _parts(thing):
        yield from generators_in(value, f"{name}.{part}" if name else part, depth - 1)


def _parts(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if isinstance(thing, list | tuple):
        return [(str(place), item) for place, item in enumerate(thing)] if len(thing) <= _MOST_ITEMS else []
    if isinstance(thing, dict):
        return [(str(key), item) for key, item in thing.items()] if len(thing) <= _MOST_ITEMS else []
    return list(getattr(thing, "__dict__", {}).items())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_generator(value: Any) -> bool:
    """Whether it is one, and none of the global ones, which every checkpoint holds."""
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not random.random.__self__ and not isinstance(value, random.SystemRandom)  # type: ignore[attr-defined]
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(value, numpy.random.RandomState):
        return value is not numpy.random.mtrand._rand
    return isinstance(value, numpy.random.Generator)


def _digest(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        state = bytes(generator.get_state().numpy())
    elif isinstance(generator, random.Random):
        state = repr(generator.getstate()).encode()
    else:
        bits = getattr(generator, "bit_generator", None)
        found = generator.get_state(legacy=False) if bits is None else bits.state
        state = repr(sorted(found.items(), key=str)).encode() + _words(found)
    return hashlib.blake2b(state, digest_size=16).hexdigest()


def _words(state: Mapping[str, Any]) -> bytes:
    """The words of a Mersenne twister, which ``repr`` cuts short."""
    inner = state.get("state")
    key = inner.get("key") if isinstance(inner, Mapping) else None
    return b"" if key is None else bytes(key.tobytes())
