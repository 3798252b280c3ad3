"""Telling people something on the way, above all that it takes its time, where a program set up who tells them."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["ON_SILENCE", "counted", "tell", "tell_once", "told_when_slow"]

T = TypeVar("T")

SILENT_SECONDS = 5.0
ON_SILENCE: ContextVar[Callable[[str], None] | None] = ContextVar("ON_SILENCE", default=None)
"""Gets a sentence for people; None: nobody is there to be told."""
_TOLD: set[object] = set()


def tell(sentence: str) -> None:
    """Tell ``sentence`` now; as a warning where no program set up who tells it."""
    if (told := ON_SILENCE.get()) is not None:
        told(sentence)
    else:
        warnings.warn(sentence, stacklevel=3)


def tell_once(sentence: str, *, of: object) -> None:
    """The same, once in this process for all that is told ``of`` one thing."""
    if of not in _TOLD:
        _TOLD.add(of)
        tell(sentence)


@contextmanager
def told_when_slow(sentence: str) -> Iterator[None]:
    """Tell ``sentence`` where the block has not ended after ``SILENT_SECONDS``."""
    tell = ON_SILENCE.get()
    if tell is None:
        yield
        return
    timer = threading.Timer(SILENT_SECONDS, tell, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def counted(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """``items``, telling every ``SILENT_SECONDS`` how many of ``total`` are done: ``what`` is said of them."""
    tell = ON_SILENCE.get()
    told = time.monotonic()
    for count, item in enumerate(items):
        if tell is not None and time.monotonic() - told >= SILENT_SECONDS:
            tell(f"{count:,} of {total:,} {what}")
            told = time.monotonic()
        yield item
