"""The ranks of this machine where torchrun starts them: one process is ours, and the ranks are below it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.child_processes import shell_code, start_here
from hpcaccel.node.environment.container_command import Wrapped

__all__ = ["LocalAgent"]


class LocalAgent:
    """One torchrun with all ranks, on the local backend. As Slurm does, it signals every process below."""

    def __init__(self, run: RunDir, wrapped: Wrapped, *, attempt: int, workdir: str, number: signal.Signals) -> None:
        self._signal = number
        self._agent = start_here(wrapped, workdir=workdir, log=run.rank_log(attempt, 0))
        self._seen: set[int] = set()

    def poll(self) -> int | None:
        code = self._agent.poll()
        if code is None:
            self._seen.update(_below(self._agent.pid))
            return None
        for pid in self._seen:  # what a rank has left behind leads a session of its own
            _send(pid, signal.SIGKILL, group=True)
        return shell_code(code)

    def ask(self) -> None:
        self._send(self._signal)

    def kill(self) -> None:
        for pid in _below(self._agent.pid):
            _send(pid, signal.SIGKILL, group=True)
        _send(self._agent.pid, signal.SIGKILL, group=True)

    def dump(self) -> None:
        self._send(signal.SIGURG)

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in [self._agent.pid, *_below(self._agent.pid)]:
            _send(pid, number)


def _below(pid: int) -> Iterator[int]:
    """All processes that descend from one, see proc(5)."""
    for thread in _listed(Path(f"/proc/{pid}/task")):
        try:
            children = (thread / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _below(child)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _send(pid: int, number: signal.Signals, *, group: bool = False) -> None:
    try:
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
