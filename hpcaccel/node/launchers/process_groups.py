"""Signals to process groups and processes that may have ended: the kernel gives their numbers to others."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable

from hpcaccel.core.process_identity import process_start

__all__ = ["KnownProcesses", "ProcessGroups"]


class ProcessGroups:
    """The groups of children, each of which is the leader of its own.

    A group can outlive its leader. Its number is free once the group is empty: then it is not signalled any more.

    Args:
        leaders: the children.
    """

    def __init__(self, leaders: Iterable[subprocess.Popen[bytes]]) -> None:
        self._leaders = list(leaders)

    def look(self) -> None:
        """Forget the groups that are empty. To be called each time that the children have been polled."""
        self._leaders = [one for one in self._leaders if one.returncode is None or _exists(one.pid)]

    def send(self, number: signal.Signals) -> None:
        """Signal all processes of all groups."""
        self.look()
        for leader in self._leaders:
            try:
                os.killpg(leader.pid, number)
            except ProcessLookupError:
                pass


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # no group, or another user's
        return False
    return True


class KnownProcesses:
    """Processes that have been seen, with the times of their start, which tell them from later ones with their IDs."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}

    def add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if (start := process_start(pid)) is not None:
                self._starts[pid] = start

    def alive(self) -> list[int]:
        """The IDs of those that have not ended."""
        return [pid for pid, start in self._starts.items() if process_start(pid) == start]
