"""Locks by which two processes of a user do one thing after the other.

Each goes with the process that took it, and with the programs that this process has given it to. Where there are none,
because the file system knows no flock or the state directory cannot be written, everything goes on without them.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from hpcaccel.core.progress_notes import tell_once, told_when_slow

__all__ = ["UNLOCKED", "forget_old", "give_back", "take", "take_if_free", "tell_of_no_state"]

UNLOCKED = -1
"""In place of a descriptor, where there can be no lock."""


def take(path: Path, *, what: str) -> int:
    """Wait for the lock ``path``, which is made where it is missing; its descriptor, for :func:`give_back`, or
    ``UNLOCKED``.

    Args:
        what: what another process does that holds it, for who waits.
    """
    with told_when_slow(f"waiting for another hpcaccel of yours that {what}: Ctrl-C gives up"):
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
    if lock == UNLOCKED:
        return
    if remove:
        with suppress(OSError):
            path.unlink()
    os.close(lock)


def forget_old(folder: Path, *, older_than_seconds: float) -> None:
    """Delete the files of ``folder``, locks among them, that nobody has written for so long."""
    oldest = time.time() - older_than_seconds
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # another process may have forgotten it
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)


def tell_of_no_state(error: OSError, place: Path) -> None:
    """Say once that nothing is kept of what this process submits."""
    tell_once(
        f"{place} cannot be used ({error.strerror or error}): this command goes on without it. If it is cut off, look "
        "with `hpcaccel list` before it is given again. XDG_STATE_HOME names another place",
        of=tell_of_no_state,
    )


def _taken(path: Path, how: int) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, how)
                if _is_still_at(path, lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # its holder has removed the file while we waited: who comes next makes a new one
    except BlockingIOError:
        return None
    except OSError as error:
        tell_of_no_state(error, path.parent)
        return UNLOCKED


def _is_still_at(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
