"""Search of the script's variables, datasets and models for random generators that checkpoints do not contain.

Of the script's own generators, checkpoints contain only those of prepared loaders and registered objects. Any other
generator makes a resume inexact if the training draws from it. A generator that is no longer drawn from, such as one
used only to split the dataset, does not matter. So each generator's state is compared with its first recorded state.
Loader workers draw from copies, which are not accessible from here.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinMethodType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["ScriptGenerators", "generators_in"]

_DEPTH = 4
"""Levels of attributes and items that are searched in a dataset or model."""
_DEPTH_OF_VARIABLES = 3
"""Levels that are searched in the script's variables."""
_MOST_ITEMS = 32
"""Lists and dicts with more items are not searched: they hold data, not the components of a dataset."""
_LEAVES = (torch.Tensor, np.ndarray, ModuleType, type, str, bytes, int, float, type(None))
"""Types of objects that are not searched."""
_KINDS = frozenset({torch.Generator, random.Random, np.random.RandomState, np.random.Generator})
_GLOBAL = (torch.default_generator, random.random.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every torch module, which are not searched."""
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class ScriptGenerators:
    """The generators that are reachable from the script, each with its state when it was first found."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, str]] = {}
        """Generators and their first states, by id. The reference to a generator prevents another object from getting
        its id."""
        self._late: set[int] = set()
        """Ids of generators that were found after the training had begun."""

    @property
    def any(self) -> bool:
        return bool(self._seen)

    def look(self, parts: Mapping[str, Any], known: Iterable[Any], *, begins: bool = False) -> Iterator[str]:
        """Reasons why a checkpoint saved now is not bit-exact: generators of the script that the checkpoint lacks.

        Args:
            parts: objects to search besides the script's variables, by name.
            known: generators in the checkpoint, and objects that are saved with all their generators.
            begins: whether the training begins now. Generators that are first found by a later call count as created
                later.
        """
        saved = {id(item) for thing in known for _, item in _held_by(thing)}
        moved, made = [], []
        for name, generator in self._reachable(parts):
            key, state = id(generator), _digest(generator)
            if key in saved:
                continue
            if key not in self._seen:
                self._seen[key] = generator, state
                if not begins:
                    self._late.add(key)
            if key in self._late:
                made.append(name)
            elif self._seen[key][1] != state:
                moved.append(name)
        if moved:
            yield f"generators that are not saved in checkpoints have been used: {', '.join(moved)}"
        if made:
            yield f"generators created after the training began are not saved in checkpoints: {', '.join(made)}"

    @staticmethod
    def _reachable(parts: Mapping[str, Any]) -> list[tuple[str, Any]]:
        found: dict[int, tuple[str, Any]] = {}
        named = (pair for name, thing in parts.items() for pair in generators_in(thing, name))
        for name, generator in (*named, *_walk(_variables(), _DEPTH_OF_VARIABLES)):
            found.setdefault(id(generator), (name, generator))
        return list(found.values())


def _held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """The generators that are saved with an object; none for a module, whose state has only tensors."""
    return iter(()) if isinstance(thing, nn.Module) else generators_in(thing, "")


def _variables() -> Iterator[tuple[str, Any]]:
    """Names and values of the variables of functions on the call stack, of the script itself, and of the script's own
    modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame):
            own = frame.f_locals
            yield from list(own.items())
            if "self" in own:
                yield from ((f"self.{name}", value) for name, value in _attributes(own["self"]))
        frame = frame.f_back
    yield from list(vars(sys.modules["__main__"]).items())
    for name, module in list(sys.modules.items()):
        variables = getattr(module, "__dict__", {})
        if _is_the_scripts(name, variables.get("__file__")):
            yield from ((f"{name}.{variable}", value) for variable, value in list(variables.items()))


def _is_the_scripts(name: str, file: Any) -> bool:
    """Whether a module is neither installed nor part of the standard library."""
    if not isinstance(file, str) or name == "__main__" or name.partition(".")[0] in ("hpcaccel", "torch"):
        return False
    return not (file.startswith(_INSTALLED) or "/site-packages/" in file or "/dist-packages/" in file)


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("hpcaccel", "torch", "runpy", "importlib")


def generators_in(thing: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Pairs of path and generator, for all generators in ``thing`` and its parts. Paths begin with ``name``:
    ``dataset.rng``."""
    return _walk([(name, thing)], depth)


def _walk(things: Iterable[tuple[str, Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """The generators in ``things``, breadth first: each object is searched once, by its shortest path."""
    waiting = deque((name, thing, depth) for name, thing in things)
    seen: set[int] = set()
    while waiting:
        name, thing, left = waiting.popleft()
        kind = type(thing)  # isinstance() would call a proxy's __class__
        if issubclass(kind, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if _is_generator(thing):
            yield name, thing
        if left == 0:
            continue
        if issubclass(kind, nn.Module):
            # Submodules do not count as deeper: a model's layers are nested at any depth.
            waiting.extendleft((f"{name}.{part}", module, left) for part, module in thing._modules.items())
        waiting.extend((f"{name}.{part}" if name else f"{part}", value, left - 1) for part, value in _parts(thing))
        waiting.extend((f"{name}.{part}", value, 0) for part, value in _of_classes(kind, seen))


def _parts(thing: Any) -> list[tuple[str, Any]]:
    kind = type(thing)
    if issubclass(kind, nn.Module):
        return [(name, value) for name, value in _attributes(thing) if name not in _OF_EVERY_MODULE]
    if issubclass(kind, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        filled = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        return [
            *filled,
            *(("default", value) for value in thing.__defaults__ or ()),
            *(thing.__kwdefaults__ or {}).items(),
        ]
    if issubclass(kind, MethodType | BuiltinMethodType):
        return [("self", thing.__self__)]
    if issubclass(kind, functools.partial):
        return [
            ("func", thing.func),
            *((str(place), item) for place, item in enumerate(thing.args)),
            *thing.keywords.items(),
        ]
    if issubclass(kind, GeneratorType):
        frame = thing.gi_frame
        return [] if frame is None or _is_ours(frame) else list(frame.f_locals.items())
    if issubclass(kind, list | tuple):
        return [(str(place), item) for place, item in enumerate(thing)] if len(thing) <= _MOST_ITEMS else []
    if issubclass(kind, dict):
        return [(str(key), item) for key, item in thing.items()] if len(thing) <= _MOST_ITEMS else []
    return [] if _holds_none(kind) else _attributes(thing)


def _holds_none(kind: type) -> bool:
    """Whether objects of a class are not searched: classes of hpcaccel, whose generators are covered elsewhere, and of
    torch outside ``torch.utils.data``."""
    root, _, rest = str(kind.__module__).partition(".")
    return root == "hpcaccel" or (root == "torch" and not rest.startswith("utils.data"))


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    try:
        return list(vars(thing).items())
    except Exception:  # no __dict__, or a proxy whose object is gone
        return []


def _of_classes(kind: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The generators that are attributes of a class or of its bases; each class is searched once."""
    for one in kind.__mro__:
        if id(one) in seen or one.__module__ == "builtins" or _holds_none(one):
            continue
        seen.add(id(one))
        yield from ((name, value) for name, value in list(vars(one).items()) if _is_generator(value))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator with a state, other than the global ones, which checkpoints contain."""
    if _KINDS.isdisjoint(type(value).__mro__) or type(value) is random.SystemRandom:
        return False
    return not any(value is one for one in _GLOBAL)


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
    """The state words of numpy's Mersenne twister, which ``repr`` may truncate; empty for other generators."""
    inner = state.get("state")
    key = inner.get("key") if isinstance(inner, Mapping) else None
    return b"" if key is None else bytes(key.tobytes())
