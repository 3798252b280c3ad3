"""Protection of a submission: locks against the user's other processes, and deferred signals.

A lock is held until the process that took it has released it or ended, and all programs that inherited the lock have
ended. If the file system has no flock, or the state directory is not writable, submissions work without locks.

While a new run is created, SIGTERM and SIGHUP (sent if the connection to the login node is lost) undo the creation,
unless the signal is ignored (nohup) or has a handler. During the submission, signals are deferred until the job is
recorded.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hpcaccel.core.durable_files import lock_file
from hpcaccel.core.progress_notes import show_note_once, show_note_when_slow

__all__ = [
    "UNLOCKED",
    "defer_signals",
    "give_back",
    "raise_on_signals",
    "remove_old_files",
    "take",
    "take_if_free",
    "warn_no_state",
]


UNLOCKED = -1
"""Returned instead of a descriptor if locks are not available."""


def take(path: Path, *, what: str) -> int:
    """Lock the file ``path``, which is created if it is missing. Waits while another process holds the lock.

    Args:
        what: what the holder of the lock is doing, such as ``is submitting RUN``, for the message during the wait.

    Returns:
        The descriptor, for :func:`give_back`, or ``UNLOCKED``.
    """
    with show_note_when_slow(f"waiting for another of your hpcaccel processes that {what} (press Ctrl-C to cancel)"):
        lock = _locked(path, wait=True)
    assert lock is not None
    return lock


def take_if_free(path: Path) -> int | None:
    """Like :func:`take`, without waiting: returns None if another process holds the lock."""
    return _locked(path, wait=False)


def give_back(path: Path, lock: int, *, remove: bool = False) -> None:
    """Release a lock.

    Args:
        remove: whether to delete the lock file, as is done for locks that are used only once.
    """
    if lock == UNLOCKED:
        return
    if remove:
        with suppress(OSError):
            path.unlink()
    os.close(lock)


def remove_old_files(folder: Path, *, older_than_seconds: float) -> None:
    """Delete all files in ``folder`` (lock files too) that were last written more than ``older_than_seconds`` ago."""
    oldest = time.time() - older_than_seconds
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # another process may have deleted it
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)


def warn_no_state(error: OSError, place: Path) -> None:
    """Warn once that this process cannot record what it submits."""
    show_note_once(
        f"state directory {place} cannot be used ({error.strerror or error}): the command continues without it. If "
        "the command is interrupted, check with `hpcaccel list` before you repeat it. To use another directory, set "
        "XDG_STATE_HOME",
        of=warn_no_state,
    )


def _locked(path: Path, *, wait: bool) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                state = lock_file(lock, wait=wait)
                if state == "unsupported":
                    raise OSError(errno.ENOLCK, "its file system does not support locks")
                if state == "busy":
                    os.close(lock)
                    return None
                if _is_still_at(path, lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # the holder has removed this file, so the next process locks a new one: try again
    except OSError as error:
        warn_no_state(error, path.parent)
        return UNLOCKED


def _is_still_at(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False


_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RAISED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that by default end a process without cleanup. SIGINT raises KeyboardInterrupt anyway."""


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def raise_on_signals() -> Iterator[Callable[[], None]]:
    """On SIGTERM or SIGHUP, raise an exception in the block, for cleanup, and then end the process with that signal.

    Works only in the main thread, and only for signals that have the default handler.

    Yields:
        A function with which the block can restore the default handlers before it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread can set handlers
        return
    ours = [number for number in _RAISED if signal.getsignal(number) is signal.SIG_DFL]

    def raise_it(number: int, _: FrameType | None) -> None:
        raise _Signalled(number)

    def restore() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, raise_it)
    try:
        yield restore
    except _Signalled as end:
        restore()
        signal.raise_signal(end.number)
    finally:
        restore()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP until the end of the block. Commands started in the block have them blocked.

    A signal after a job is submitted and before it is recorded would leave an unrecorded job. Works only in the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in _DEFERRED}
    for number in before:
        signal.signal(number, lambda number, _: arrived.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)  # commands inherit the mask, other threads do not
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in arrived:
            signal.raise_signal(late)
