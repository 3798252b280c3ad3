"""The descendants of this process: what Linux reports about them, and how to kill them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

__all__ = [
    "adopt_orphans",
    "exit_as",
    "fork_is_bad",
    "has_device",
    "has_loaded",
    "kill_descendants",
    "of_own_session",
    "out_of_memory_kills",
]

KILL_SECONDS = 10.0
"""How long processes may take to end after SIGKILL."""
NO_DEVICES = (
    "/dev/fd", "/dev/null", "/dev/pts/", "/dev/random", "/dev/shm/", "/dev/stderr", "/dev/stdin", "/dev/stdout",
    "/dev/tty", "/dev/urandom", "/dev/zero",
)  # fmt: skip
"""Files below /dev that a forked process may use like its parent."""
_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, see prctl(2)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """The IDs of all descendants, see proc(5). The threads of a zombie may still be running."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def of_own_session() -> set[int]:
    """The IDs of the descendants in this process's session. A rank has a session of its own."""
    found = set()
    for pid in descendants():
        try:
            if os.getsid(pid) == os.getsid(0):
                found.add(pid)
        except OSError:
            pass  # it has just ended
    return found


def kill_descendants(reap: Callable[[], None]) -> None:
    """Kill all descendants of this process and wait until they have ended, for at most ``KILL_SECONDS``.

    Args:
        reap: collects ended children.
    """
    end = time.monotonic() + KILL_SECONDS
    while (found := descendants()) and time.monotonic() < end:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # it has just ended, or has another user's rights
        time.sleep(0.002)
        reap()
    reap()


def has_loaded(pid: int, *libraries: str) -> bool:
    """Whether a process has mapped a file whose name begins with one of ``libraries``, see proc(5)."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any(line.rpartition("/")[2].startswith(libraries) for line in file if "/" in line)
    except OSError:
        return False


def out_of_memory_kills() -> int | None:
    """How many processes of this node the kernel has killed for lack of memory; None if it does not count them."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def has_device() -> bool:
    """Whether this process has opened a device, such as a GPU (/dev/nvidia0, /dev/kfd, /dev/dri) or a network card. The
    libraries of most devices cannot be used after a fork."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the list itself
        if target.startswith("/dev/") and not target.startswith(NO_DEVICES):
            return True
    return False


def fork_is_bad() -> bool:
    """Whether this process, if it was forked, cannot use GPUs, because its parent has initialised CUDA or has counted
    GPUs through it. Only in the forked process does torch know the latter."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized())


def exit_as(status: int) -> None:
    """End this process as the process with the wait status ``status`` ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
