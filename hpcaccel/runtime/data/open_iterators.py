"""The iterators of all DataLoaders of this process, so that one is seen that a script keeps from step to step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["half_read_iterators", "watch_iterators"]

_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_iterators() -> None:
    """Know every iterator that is made from now on.

    Torch tells nobody when a DataLoader is iterated, and a ``for`` or ``zip`` holds its iterator where no variable is.
    So the constructor is wrapped; iterators themselves are as they were.
    """
    made: Any = _BaseDataLoaderIter.__init__
    if getattr(made, "notes_iterators", False):
        return

    @functools.wraps(made)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        _alive.add(self)

    init.notes_iterators = True  # type: ignore[attr-defined]
    _BaseDataLoaderIter.__init__ = init  # type: ignore[method-assign]


def half_read_iterators() -> list[Any]:
    """Those that have given something and are not at their end."""
    return [iterator for iterator in _alive if _is_half_read(iterator)]


def _is_half_read(iterator: Any) -> bool:
    if not getattr(iterator, "_num_yielded", 0) or getattr(iterator, "_finished", False):
        return False
    try:
        return bool(iterator._num_yielded < len(iterator))
    except TypeError:  # of a stream: a loader whose workers persist holds it also when it is at the end
        return True
