"""Telling people that something takes its time, where a program set up who tells them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["ON_SILENCE", "told_when_slow"]

SILENT_SECONDS = 5.0
ON_SILENCE: ContextVar[Callable[[str], None] | None] = ContextVar("ON_SILENCE", default=None)
"""Gets a sentence for people; None: nobody is there to be told."""


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
