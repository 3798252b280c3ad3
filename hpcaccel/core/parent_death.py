"""A signal to a child process when its parent dies, prctl(2). Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection

__all__ = ["die_with", "dying_with_us"]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def dying_with_us(
    number: signal.Signals = signal.SIGKILL, *, blocked: Collection[signal.Signals] = ()
) -> Callable[[], None]:
    """Returns a ``preexec_fn`` for Popen: the child then gets signal ``number`` when this process dies (prctl(2)).

    Use it only in single-threaded processes: the kernel sends the signal as soon as the thread that forked ends.

    Args:
        blocked: signals that are blocked in the child; all others are unblocked.
    """
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        die_with(parent, number)

    return between_fork_and_exec


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send signal ``number`` to this process when its parent dies; exit if it has died already.

    Args:
        parent: the parent's process id, read before the fork.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(128 + number)
