"""Notes to the user while a command waits or makes progress, shown by the function in ``SHOW_NOTE``."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["SHOW_NOTE", "show_note", "show_note_once", "show_note_when_slow", "show_progress"]

T = TypeVar("T")

SILENT_SECONDS = 5.0
"""Shortest wait that a command reports, and shortest interval between progress notes."""
SHOW_NOTE: ContextVar[Callable[[str], None] | None] = ContextVar("SHOW_NOTE", default=None)
"""The function that shows a note. If it is None, notes about waits and progress are dropped, and other notes become
warnings."""
_SHOWN: set[object] = set()
"""Values of ``of`` for which ``show_note_once`` has shown a note."""


def show_note(sentence: str) -> None:
    """Show ``sentence`` now; as a warning if no program has set ``SHOW_NOTE``."""
    if (show := SHOW_NOTE.get()) is not None:
        show(sentence)
    else:
        warnings.warn(sentence, stacklevel=3)


def show_note_once(sentence: str, *, of: object) -> None:
    """Like :func:`show_note`, but only once per value of ``of`` in this process."""
    if of not in _SHOWN:
        _SHOWN.add(of)
        show_note(sentence)


@contextmanager
def show_note_when_slow(sentence: str) -> Iterator[None]:
    """Show ``sentence`` if the block takes longer than ``SILENT_SECONDS``."""
    show = SHOW_NOTE.get()
    if show is None:
        yield
        return
    timer = threading.Timer(SILENT_SECONDS, show, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield ``items`` and show, at most every ``SILENT_SECONDS``, how many are done: ``12 of 800 {what}``."""
    show = SHOW_NOTE.get()
    shown_at = time.monotonic()
    for count, item in enumerate(items):
        if show is not None and time.monotonic() - shown_at >= SILENT_SECONDS:
            show(f"{count:,} of {total:,} {what}")
            shown_at = time.monotonic()
        yield item
