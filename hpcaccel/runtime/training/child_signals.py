"""What SIGTERM means to the processes that a rank starts with ``multiprocessing``.

Slurm sends the SIGTERM of a preemption to every process of a step. The rank then trains on to the end of its step and
saves, for which it needs its children: workers of loaders, pools, simulators. But SIGTERM is also what ``terminate()``
sends, and what Python sends at the end of a program to the daemonic children that are left, before it waits for them
without a limit. A child must pass the first over and obey the second. A signal handler does not learn who has sent the
signal, so ``terminate()`` notes the child's pid in shared memory first. A child that has just been forked would lose
the signal, for Python drops those that come before it has set up the child; until the child says there that it listens,
it gets SIGKILL.

A handler in Python runs between two bytecodes. A signal that comes after the last of them and before a system call that
waits, for the lock of a pool's queue say, is seen only when that call returns. Whoever waits for a child that was
terminated therefore interrupts its system calls by a signal that does nothing, until the child has gone.

Children in which that memory cannot be seen (``spawn``, ``forkserver``) hear SIGTERM as Python does. Where they have
inherited it blocked, as the shim and the start of a loader's workers have it, or ignore it, they get SIGKILL instead.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import popen_fork, util
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SIGNALS", "shield_children"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""What asks a rank to stop."""

PATIENCE_SECONDS = 10.0
"""How long daemonic children may take to leave at the end of the program, before they are killed."""


_TERMINATED, _LISTENS = 1, 2
_INTERRUPT = signal.SIGRTMIN + 3
"""Does nothing in a child but end its system call with EINTR, so that Python runs the handlers that are due."""


class _Shield:
    """What children inherit from this process."""

    def __init__(self) -> None:
        largest = int(Path("/proc/sys/kernel/pid_max").read_text())
        self.words = mmap.mmap(-1, largest + 1)
        """A byte for each pid: ``_LISTENS`` once a child has set up what it listens to, ``_TERMINATED`` where
        ``terminate`` has been called after that. Untouched pages take no memory."""
        self.earlier = {child.pid for child in multiprocessing.active_children()}
        """Children that know nothing of it."""


_shield: _Shield | None = None
_handler: Callable[..., Any] | None = None
"""This rank's own handler of ``SIGNALS``, which its children are not to keep."""
_born_with_defaults = 0
"""The pid of the child in which the signals have been set to their defaults."""
_terminate = popen_fork.Popen.terminate
_poll = popen_fork.Popen.poll
_wait = popen_fork.Popen.wait


def shield_children(handler: Callable[..., Any]) -> None:
    """From now on the children of this rank pass ``SIGNALS`` over, unless ``terminate()`` has sent them.

    Args:
        handler: the rank's own handler of the signals. Only the main thread can have installed one.
    """
    global _shield, _handler
    _handler = handler
    if _shield is not None:
        return
    _shield = _Shield()
    util.register_after_fork(_shield, _pass_over)
    util.Finalize(None, _end_children, exitpriority=0)
    popen_fork.Popen.terminate = _terminate_for_sure  # type: ignore[method-assign, assignment]
    popen_fork.Popen.poll = _poll_and_forget  # type: ignore[method-assign, assignment]
    popen_fork.Popen.wait = _wait_for_sure  # type: ignore[method-assign, assignment]


def _has_defaults() -> None:
    """In every process that was forked from this one: signals have their defaults, as in a fork of a plain Python."""
    global _born_with_defaults
    blocked = set(SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and _shield is not None:
        return  # a prepared loader starts it, and it will say itself what it listens to
    if blocked and "HPCACCEL_RUN_DIR" not in os.environ:
        return  # the script's own doing
    for number in SIGNALS:
        if _handler is not None and signal.getsignal(number) in (_handler, _leave_if_terminated):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    _born_with_defaults = os.getpid()


# The shim has them blocked until there is an Accelerator, and a script may start processes before that.
os.register_at_fork(after_in_child=_has_defaults)


def _pass_over(shield: _Shield) -> None:
    """In a child of ``multiprocessing``, before it runs anything of the script."""
    if _born_with_defaults == os.getpid():
        _listen()
        workers: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        if workers is not None:
            # A worker of a loader that was not prepared would next install torch's handler, which dies of the
            # scheduler's.
            workers._set_worker_signal_handlers = _then_listen(workers._set_worker_signal_handlers)
    signal.signal(_INTERRUPT, _do_nothing)
    shield.words[os.getpid()] = _LISTENS


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler of ``_INTERRUPT``."""


def _then_listen(install: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        install()
        _listen()

    return both


def _listen() -> None:
    for number in SIGNALS:
        signal.signal(number, _leave_if_terminated)


def _leave_if_terminated(number: int, frame: FrameType | None) -> None:
    if _shield is None or number != signal.SIGTERM or _shield.words[os.getpid()] != _TERMINATED:
        return
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if worker is not None and worker.get_worker_info() is not None:
        os._exit(0)  # as with torch's handler: a worker that a signal has ended raises an error in the rank
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate_for_sure(popen: popen_fork.Popen) -> None:
    """In place of ``Popen.terminate``, of all start methods."""
    assert _shield is not None
    if popen.returncode is None:
        if popen.method == "fork" and popen.pid not in _shield.earlier:
            if not _shield.words[popen.pid]:
                popen.kill()
                return
            _shield.words[popen.pid] = _TERMINATED
        if _has_signal(popen.pid, signal.SIGTERM, "SigBlk:", "SigIgn:"):
            popen.kill()
            return
    _terminate(popen)


def _poll_and_forget(popen: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
    """In place of ``Popen.poll``: once a child has been waited for, another process may get its number."""
    was_there = popen.returncode is None
    code = _poll(popen, flag)
    if was_there and code is not None and _shield is not None:
        _shield.words[popen.pid] = 0
        _shield.earlier.discard(popen.pid)
    return code


def _wait_for_sure(popen: popen_fork.Popen, timeout: float | None = None) -> int | None:
    """In place of ``Popen.wait``: a child that was terminated may have missed that in a system call."""
    if popen.returncode is not None or _shield is None or _shield.words[popen.pid] != _TERMINATED:
        return _wait(popen, timeout)
    give_up = None if timeout is None else time.monotonic() + timeout
    pause = 0.001
    while (code := popen.poll()) is None:
        left = pause if give_up is None else give_up - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)
        if _has_signal(popen.pid, _INTERRUPT, "SigCgt:"):
            os.kill(popen.pid, _INTERRUPT)
    return code


def _has_signal(pid: int, number: int, *masks: str) -> bool:
    """Whether one of a process's masks has the signal; see proc(5)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has gone
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(masks)]
    return any(mask >> (number - 1) & 1 for mask in found)


def _end_children() -> None:
    """At the end of the program, before Python waits for its daemonic children without a limit."""
    if threading.current_thread() is threading.main_thread():
        # torch's handler would raise an error for each worker that a signal ends.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    give_up = time.monotonic() + PATIENCE_SECONDS
    for child in children:
        child.join(max(0.0, give_up - time.monotonic()))
        if child.is_alive():
            child.kill()
