"""Program that kills the ranks of a launcher that was killed. The launcher starts it; nothing imports it.

Usage: ``python orphan_guard.py NAME=VALUE``, a variable that only the launcher's ranks and their children have.

It reads lines from a pipe that the launcher holds open: the process ids of the running ranks, or the word ``done``.
The pipe closes when the launcher ends, even by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time

PAUSE_SECONDS = 0.1
QUIET_ROUNDS = 10
"""Searches without a result after which nothing is left: a rank that was being started has the variable by then."""
LONGEST_SECONDS = 60


def main() -> None:
    """Read the pipe on stdin to its end, then kill the ranks, and all processes that they have started."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    if lines[-1:] == ["done"]:
        return
    ranks = {int(word) for word in lines[-1].split()} if lines else set()
    found = family(ranks, sys.argv[1])
    for rank in ranks:
        kill(rank, group=True)
    quiet, end = 0, time.monotonic() + LONGEST_SECONDS
    while quiet < QUIET_ROUNDS and time.monotonic() < end:
        for pid in found:
            kill(pid)
        quiet = 0 if found else quiet + 1
        time.sleep(PAUSE_SECONDS)
        found = family(set(), sys.argv[1])


def family(ranks: set[int], mark: str) -> set[int]:
    """The running processes that are in ``ranks`` or have the variable, and all processes that descend from them."""
    parents: dict[int, int] = {}
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="latin-1") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state == "Z":
                continue
            parents[int(name)] = int(parent)
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = mark.encode() in file.read().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            marked = False
        if marked or int(name) in ranks:
            found.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill(pid: int, *, group: bool = False) -> None:
    """Send SIGKILL to a process, or to its group, that may have ended."""
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    main()
