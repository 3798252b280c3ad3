"""Signals and lifetimes of the batch step's processes: which ones are waited for, and what a child inherits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccel.node.environment.container_command import Wrapped

__all__ = ["WATCHED", "default_signals", "dying_with_us", "shell_code", "start_here", "take_over_signals"]

WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD}
"""Blocked in each process of the batch step, and waited for."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def take_over_signals() -> None:
    """Hear what the batch script heard during its set-up. Until here it ignored USR2, which our children must not; and
    whoever started it may ignore CHLD, which would then never come, nor would the exit codes of children."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name in os.environ.pop("HPCACCEL_EARLY_SIGNALS", "").split():
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def default_signals() -> None:
    """Between fork and exec: the supervisor blocks the signals that it waits for; its children must not."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def dying_with_us(
    number: signal.Signals = signal.SIGKILL, *, deaf_to: Collection[signal.Signals] = ()
) -> Callable[[], None]:
    """As above; and the child gets a signal when this process is killed, so that nothing goes on without us (prctl(2)).

    Only for a process of one thread: the kernel means the thread that forks.

    Args:
        deaf_to: signals that are to stay blocked in the child.
    """
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, deaf_to)
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # killed in between
            os._exit(128 + number)

    return between_fork_and_exec


def shell_code(code: int) -> int:
    """Popen's exit code as a shell has it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def start_here(wrapped: Wrapped, *, workdir: str, log: Path) -> subprocess.Popen[bytes]:
    """A process on this machine, in a group of its own, which ends with this one."""
    with log.open("ab") as output:
        return subprocess.Popen(
            wrapped.command,
            env=wrapped.env,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=dying_with_us(),
            start_new_session=True,
        )
