"""The flag that SIGTERM and SIGUSR2 set, and the protection of data-loader workers from both signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcaccel.runtime.child_signals import SIGNALS, shield_children

__all__ = ["StopFlag", "WorkerInit", "signals_held"]


class StopFlag:
    """Flag (``raised``) that SIGTERM and SIGUSR2 set."""

    def __init__(self) -> None:
        self.raised = False
        self._installed = False

    def install(self) -> bool:
        """Install the handlers and unblock both signals, which hpcaccel's launcher blocks before it starts the program.

        Only the main thread can install handlers. In another thread this does nothing and returns False.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            signal.signal(number, self._raise)
            # The handler only sets the flag: restart the training's system calls instead of failing with EINTR.
            signal.siginterrupt(number, False)
        shield_children(self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._installed = True
        return True

    def ignore_signals(self) -> None:
        """Ignore both signals from now on, unless the script has replaced the handlers. At exit the interpreter
        restores default handlers, and a second SIGTERM would turn a clean exit into 143."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            for number in SIGNALS:
                if signal.getsignal(number) == self._raise:  # otherwise the script has installed its own handler
                    signal.signal(number, signal.SIG_IGN)

    def clear(self) -> None:
        self.raised = False

    def _raise(self, number: int, frame: object) -> None:
        self.raised = True


@contextmanager
def signals_held() -> Iterator[None]:
    """Block both signals while workers start: the signals would kill workers that do not ignore them yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class WorkerInit:
    """A ``worker_init_fn`` that ignores both signals, then calls the user's function.

    Slurm sends the signals to every process of a step, and a killed worker would fail a training that is about to save.
    """

    user_function: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.user_function is not None:
            self.user_function(worker_id)
