"""Whose turn it is to ask: of all the processes of a user that find an answer too old, one asks and the others wait.

The lock is an flock, which ends with its process however that ends. On a file system without flock each process asks
for itself.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["turn"]

LOOK_SECONDS = 0.2
STUCK_SECONDS = 150.0
"""Who holds the lock for longer than any question may take has been stopped (Ctrl-Z) and is passed by."""


@contextmanager
def turn(lock: Path, *, answered: Callable[[], bool], patience_seconds: float) -> Iterator[bool]:
    """Wait for our turn to ask.

    Yields:
        True while it is ours; False where somebody else has asked meanwhile (``answered``), or patience is over.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _wait(fd, answered, patience_seconds)
    finally:
        os.close(fd)


def _wait(fd: int, answered: Callable[[], bool], patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if answered():
                return False
            if _held_since(fd) < time.time() - STUCK_SECONDS:
                _note_turn(fd)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))  # so that many do not look in step
        except OSError:
            return True  # this file system knows no flock
        else:
            _note_turn(fd)
            return True


def _note_turn(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, repr(time.time()).encode(), 0)


def _held_since(fd: int) -> float:
    try:
        return float(os.pread(fd, 64, 0))
    except ValueError:
        return time.time()  # its holder is about to write it
