"""Signals while a run is made and handed in: first they undo what was made, then they wait for the job's number.

SIGHUP is a dropped connection to the login node. Where somebody else handles a signal, or it is ignored (nohup), that
stays as it is before the hand-in.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["held_back", "undoing"]

_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNDOING = (signal.SIGTERM, signal.SIGHUP)
"""Those that would end a process without cleaning up; SIGINT is an exception by itself."""


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def undoing() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP become an exception in the block, so that it can clean up, and end the process behind it.

    Yields:
        What gives the signals back before the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals are the main thread's
        return
    ours = [number for number in _UNDOING if signal.getsignal(number) is signal.SIG_DFL]

    def raise_it(number: int, _: FrameType | None) -> None:
        raise _Signalled(number)

    def give_back() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, raise_it)
    try:
        yield give_back
    except _Signalled as end:
        give_back()
        signal.raise_signal(end.number)
    finally:
        give_back()


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block is done, from us and from the commands that we start.

    They could leave a job behind that nobody has written down. What came meanwhile is delivered at its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in _HELD_BACK}
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # the commands inherit it; our other threads do not
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in heard:
            signal.raise_signal(late)
