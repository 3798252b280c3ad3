"""Handling of SIGTERM in the processes that a rank starts with ``multiprocessing``.

Slurm sends the SIGTERM of a preemption to every process of a job step. The rank then finishes its training step and
saves, and needs its children for that: workers of loaders, pools, simulators. But ``terminate()`` sends SIGTERM too. So
does Python at the end of a program, to the remaining daemonic children, before it waits for them indefinitely. A child
must ignore Slurm's SIGTERM and obey that of ``terminate()``. A Python handler cannot find out who sent a signal, so
``terminate()`` first marks the child's pid in shared memory. A child that has just been forked would lose the signal,
because Python drops signals until it has set up the child. Therefore ``terminate()`` sends SIGKILL to a child that has
not marked itself as ready in this memory.

A handler in Python runs between two bytecodes. If a signal arrives right before a blocking system call (such as waiting
for the lock of a pool's queue), it is handled only when that call returns. So a process that waits for a child after
``terminate()`` keeps interrupting the child's system calls with another signal, whose handler does nothing, until the
child has ended.

Children without this memory (``spawn``, ``forkserver``) have Python's default handling of SIGTERM. If they ignore
SIGTERM, or have inherited a signal mask that blocks it, ``terminate()`` sends them SIGKILL instead.
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
from multiprocessing import popen_fork, process, util
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SIGNALS", "end_children_at_exit", "shield_children"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""The signals that request a stop."""

PATIENCE_SECONDS = 10.0
"""How long daemonic children may take to end at the end of the program, before they are killed."""


_TERMINATED, _READY = 1, 2
_INTERRUPT = signal.SIGRTMIN + 3
"""Signal that interrupts a child's system call, so that Python runs pending handlers. Its own handler does nothing."""


class _Shield:
    """State that children inherit from this process."""

    def __init__(self) -> None:
        largest = int(Path("/proc/sys/kernel/pid_max").read_text())
        self.marks = mmap.mmap(-1, largest + 1)
        """One byte per pid: ``_READY`` once the child is set up, ``_TERMINATED`` once ``terminate`` was called for it.
        Untouched pages take no memory."""
        self.earlier = {child.pid for child in multiprocessing.active_children()}
        """Pids of children that were started before this state was created, and do not use it."""


_shield: _Shield | None = None
_handler: Callable[..., Any] | None = None
"""This rank's own handler of ``SIGNALS``, which its children must not keep."""
_ends_children = 0
"""Pid of the process that ends its children at exit."""
_born_with_defaults = 0
"""Pid of the forked process in which the signals have been set to their defaults."""
_terminate = popen_fork.Popen.terminate
_poll = popen_fork.Popen.poll
_wait = popen_fork.Popen.wait


def shield_children(handler: Callable[..., Any] | None) -> None:
    """Make children that ``multiprocessing`` forks from now on ignore ``SIGNALS``, except those of ``terminate()``.

    Args:
        handler: the rank's own handler of the signals, installed in the main thread; None if the rank keeps the
            signals blocked, which its children inherit.
    """
    global _shield, _handler
    _handler = handler
    if _shield is not None:
        return
    _shield = _Shield()
    util.register_after_fork(_shield, _set_up_child)
    end_children_at_exit()
    popen_fork.Popen.terminate = _terminate_reliably  # type: ignore[method-assign, assignment]
    popen_fork.Popen.poll = _poll_and_forget  # type: ignore[method-assign, assignment]
    popen_fork.Popen.wait = _wait_reliably  # type: ignore[method-assign, assignment]


def end_children_at_exit() -> None:
    """At the end of the program, kill daemonic children that ignore SIGTERM, for which Python would wait indefinitely.

    This process may have no shield: if the script handles the signals itself (``stop: signals``), or if the Accelerator
    was created in another thread than the main one. The workers of its prepared loaders ignore SIGTERM all the same.
    """
    global _ends_children
    if _ends_children != os.getpid():
        _ends_children = os.getpid()
        util.Finalize(None, _end_children, exitpriority=0)


def _restore_defaults() -> None:
    """Restore the default handling of ``SIGNALS`` in a forked process. Signals blocked by a prepared loader or by the
    script are left as they are."""
    global _born_with_defaults
    blocked = set(SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and _shield is not None:
        return  # this is a worker of a prepared loader: its worker_init_fn sets the handlers
    if blocked and "HPCACCEL_RUN_DIR" not in os.environ:
        return  # blocked by the script itself
    for number in SIGNALS:
        if _handler is not None and signal.getsignal(number) in (_handler, _leave_if_terminated):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    _born_with_defaults = os.getpid()


# The shim blocks the signals until there is an Accelerator, and a script may start processes before that.
os.register_at_fork(after_in_child=_restore_defaults)


def _set_up_child(shield: _Shield) -> None:
    """Set up a child of ``multiprocessing``, before it runs the script's code."""
    if _born_with_defaults == os.getpid():
        _install_handlers()
        workers: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        if workers is not None:
            # A worker of a loader that was not prepared would next install torch's handler, which would end the worker
            # when Slurm sends SIGTERM.
            workers._set_worker_signal_handlers = _then_install_handlers(workers._set_worker_signal_handlers)
    signal.signal(_INTERRUPT, _do_nothing)
    shield.marks[os.getpid()] = _READY


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler of ``_INTERRUPT``."""


def _then_install_handlers(install: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        install()
        _install_handlers()

    return both


def _install_handlers() -> None:
    for number in SIGNALS:
        signal.signal(number, _leave_if_terminated)


def _leave_if_terminated(number: int, frame: FrameType | None) -> None:
    if _shield is None or number != signal.SIGTERM or _shield.marks[os.getpid()] != _TERMINATED:
        return
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if worker is not None and worker.get_worker_info() is not None:
        os._exit(0)  # as torch's handler does: if a signal killed the worker, the rank would raise an error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate_reliably(popen: popen_fork.Popen) -> None:
    """Replaces ``Popen.terminate`` for all start methods: sends SIGTERM if the child will obey it, else SIGKILL."""
    assert _shield is not None
    if popen.returncode is None:
        if not _is_there(popen):
            return
        if popen.method == "fork" and popen.pid not in _shield.earlier:
            if not _shield.marks[popen.pid]:
                popen.kill()
                return
            _shield.marks[popen.pid] = _TERMINATED
        if _has_signal(popen.pid, signal.SIGTERM, "SigBlk:", "SigIgn:"):
            popen.kill()
            return
    _terminate(popen)


def _poll_and_forget(popen: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
    """Replaces ``Popen.poll``: also clears the mark of a child that has ended, because its pid may be reused."""
    was_there = popen.returncode is None
    code = _poll(popen, flag)
    if was_there and code is not None and _shield is not None:
        _shield.marks[popen.pid] = 0
        _shield.earlier.discard(popen.pid)
    return code


def _wait_reliably(popen: popen_fork.Popen, timeout: float | None = None) -> int | None:
    """Replaces ``Popen.wait``: after ``terminate``, also interrupts a child that is blocked in a system call."""
    if popen.returncode is not None or _shield is None or _shield.marks[popen.pid] != _TERMINATED:
        return _wait(popen, timeout)
    give_up = None if timeout is None else time.monotonic() + timeout
    pause = 0.001
    while (code := popen.poll()) is None and _is_there(popen):
        left = pause if give_up is None else give_up - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)
        if _has_signal(popen.pid, _INTERRUPT, "SigCgt:"):
            os.kill(popen.pid, _INTERRUPT)
    return code


def _has_signal(pid: int, number: int, *masks: str) -> bool:
    """Whether one of the signal masks of process ``pid`` contains signal ``number``; see proc(5)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # the process has ended
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(masks)]
    return any(mask >> (number - 1) & 1 for mask in found)


def _end_children() -> None:
    """End daemonic children at the end of the program, before Python waits for them indefinitely."""
    if threading.current_thread() is threading.main_thread():
        # torch's handler would raise an error for each worker that a signal ends.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    active: list[Any] = [child for child in multiprocessing.active_children() if child.daemon]
    children = [child for child in active if _is_there(child._popen)]
    # Python would send SIGTERM to the pids of the others.
    process._children.difference_update(set(active).difference(children))  # type: ignore[attr-defined]
    for child in children:
        ignores = child.pid is not None and _has_signal(child.pid, signal.SIGTERM, "SigBlk:", "SigIgn:")
        child.kill() if ignores else child.terminate()
    give_up = time.monotonic() + PATIENCE_SECONDS
    for child in children:
        child.join(max(0.0, give_up - time.monotonic()))
        if child.is_alive() and _is_there(child._popen):
            child.kill()


def _is_there(popen: popen_fork.Popen) -> bool:
    """Whether the pid still is the child's. If something other than multiprocessing has waited for the child, such as
    ``os.wait()`` of the script, multiprocessing considers it alive, and its pid may be another process's."""
    if popen.method == "forkserver":  # the server waits for it, and reports its end
        return popen.poll() is None
    try:
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
