"""Detects the stop signals SIGTERM and SIGUSR2, and protects child processes from both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.child_signals import SIGNALS, end_children_at_exit, shield_children

__all__ = ["PendingStop", "StopFlag", "WorkerInit", "install_stop_flag", "signals_held"]


class StopFlag:
    """The flag ``raised``, which SIGTERM and SIGUSR2 set."""

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
            # The handler only sets the flag, so interrupted system calls are restarted instead of failing with EINTR.
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


class PendingStop:
    """Takes the place of ``StopFlag`` where both signals stay blocked, as hpcaccel's launcher left them.

    A signal then stays pending, and ``raised`` tests for it. Child processes inherit the mask, so they ignore both
    signals however they were started (fork, spawn, forkserver), and whichever handlers they install.
    """

    def __init__(self) -> None:
        self._raised = False

    @staticmethod
    def applies() -> bool:
        """Whether the launcher has blocked the signals. One blocked signal is enough: ``multiprocessing`` may have
        unblocked SIGTERM since."""
        return not signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(SIGNALS)

    def install(self) -> None:
        """Keep both signals blocked, and make ``terminate()`` use SIGKILL on child processes."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # Up to Python 3.12, the first ``spawn`` starts a tracker, and then unblocks these signals in this process.
        tracked: Any = resource_tracker
        tracked._IGNORED_SIGNALS = tuple(set(tracked._IGNORED_SIGNALS) - set(SIGNALS))
        if threading.current_thread() is threading.main_thread():
            # If a thread has unblocked the signals, their default handling would end the process.
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._raise)
        shield_children(None)

    @property
    def raised(self) -> bool:
        """Whether either signal has arrived."""
        pending = signal.sigpending()
        return self._raised or (bool(pending) and not pending.isdisjoint(SIGNALS))

    def ignore_signals(self) -> None:
        """Do nothing: both signals stay blocked until the process ends."""

    def _raise(self, number: int, frame: object) -> None:
        self._raised = True


def install_stop_flag(caller: str) -> PendingStop | StopFlag:
    """Install a ``PendingStop`` if the launcher has blocked the signals, else a ``StopFlag``.

    Args:
        caller: name of the public function, for the message of the error.

    Raises:
        RuntimeMisuse: handlers are needed, and this is not the main thread.
    """
    if PendingStop.applies():
        pending = PendingStop()
        pending.install()
        return pending
    flag = StopFlag()
    if not flag.install():
        raise RuntimeMisuse(f"{caller}: call it in the main thread; only the main thread can install signal handlers")
    return flag


@contextmanager
def signals_held() -> Iterator[None]:
    """Block both signals while workers start, because a worker that does not ignore them yet would be killed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class WorkerInit:
    """A ``worker_init_fn`` that makes the worker ignore both signals, then calls the user's function.

    Slurm sends the signals to every process of a job step, and a training whose worker was killed would fail before it
    could save. Python's own SIGTERM at the end of the program is ignored as well, so the workers are killed then.
    """

    user_function: Callable[[int], Any] | None

    def __post_init__(self) -> None:
        end_children_at_exit()

    def __call__(self, worker_id: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.user_function is not None:
            self.user_function(worker_id)
