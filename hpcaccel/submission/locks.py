"""Locks by which two processes of a user do one thing after the other. Each goes with the process that took it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["give_back", "take", "take_if_free"]


def take(path: Path) -> int:
    """Wait for the lock ``path``, which is made where it is missing; its descriptor, for :func:`give_back`."""
    lock = _taken(path, fcntl.LOCK_EX)
    assert lock is not None
    return lock


def take_if_free(path: Path) -> int | None:
    """The same without waiting; None where another process holds it."""
    return _taken(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def give_back(path: Path, lock: int, *, remove: bool = False) -> None:
    """Args:
    remove: delete the file, too, so that locks of which each is needed once do not pile up.
    """
    if remove:
        path.unlink(missing_ok=True)
    os.close(lock)


def _taken(path: Path, how: int) -> int | None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, how)
            if _is_still_at(path, lock):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its holder has removed the file while we waited: who comes next makes a new one


def _is_still_at(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
