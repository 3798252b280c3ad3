"""Ranks on this machine: a process for each rank, or one torchrun that starts all ranks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpcaccel.core.log import log_always
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.batch import shell_code, srun_words
from hpcaccel.node.environment.containers import Wrapped
from hpcaccel.node.launchers.process_groups import KnownProcesses, ProcessGroups

__all__ = ["LocalAgent", "LocalRanks", "start_here"]

AFTER_FIRST_SECONDS = 15
"""How long the other local ranks may run after one rank has failed. Corresponds to srun's --kill-on-bad-exit."""

log = logging.getLogger(__name__)


class LocalRanks:
    """A process on this machine for every rank, each in a process group of its own.

    Args:
        ranks: the wrapped command of each rank, in rank order.
        stop_signal: the signal that requests a stop.
        descriptors: for each rank a descriptor that its process inherits; or none.
    """

    def __init__(
        self,
        run: RunDir,
        ranks: Iterable[Wrapped],
        *,
        attempt: int,
        workdir: str,
        stop_signal: signal.Signals,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._stop_signal = stop_signal
        self._ranks = [
            start_here(
                wrapped, workdir=workdir, log=run.rank_log(attempt, rank), descriptors=descriptors[rank : rank + 1]
            )
            for rank, wrapped in enumerate(ranks)
        ]
        self._groups = ProcessGroups(self._ranks)
        """Of the ranks, and of processes that ranks have left behind (data-loader workers)."""
        self._first_failure: tuple[float, int] | None = None

    def poll(self) -> int | None:
        codes = [rank.poll() for rank in self._ranks]
        self._groups.look()
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and self._first_failure is None:
            self._first_failure = (time.monotonic(), shell_code(codes[failed[0]] or 0))
            for rank in failed:
                log_always(log, f"rank {rank}: {srun_words(codes[rank] or 0)}")
            self._send(signal.SIGTERM)
        if any(code is None for code in codes):
            if self._first_failure and time.monotonic() > self._first_failure[0] + AFTER_FIRST_SECONDS:
                self.kill()
            return None
        self._groups.send(signal.SIGKILL)
        return self._first_failure[1] if self._first_failure else 0

    def request_stop(self) -> None:
        self._send(self._stop_signal)

    def forget_stop(self) -> None:
        pass  # a request is sent once

    def kill(self) -> None:
        self._groups.send(signal.SIGKILL)

    def dump(self) -> None:
        self._send(signal.SIGURG)

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)


class LocalAgent:
    """One torchrun that starts all ranks, on the local backend. As under Slurm, signals go to torchrun and to all its
    descendants."""

    def __init__(
        self, run: RunDir, wrapped: Wrapped, *, attempt: int, workdir: str, stop_signal: signal.Signals
    ) -> None:
        self._stop_signal = stop_signal
        self._agent = start_here(wrapped, workdir=workdir, log=run.rank_log(attempt, 0))
        self._seen = KnownProcesses()
        """All descendants of torchrun seen so far. Some of them may outlive torchrun."""

    def poll(self) -> int | None:
        code = self._agent.poll()
        if code is None:
            self._seen.add(_below(self._agent.pid))
            return None
        for (
            pid
        ) in self._seen.alive():  # torchrun starts each rank in its own session, and ranks may leave processes there
            _send_to(pid, signal.SIGKILL, group=True)
        return shell_code(code)

    def request_stop(self) -> None:
        self._send(self._stop_signal)

    def kill(self) -> None:
        for pid in _below(self._agent.pid):
            _send_to(pid, signal.SIGKILL, group=True)
        _send_to(self._agent.pid, signal.SIGKILL, group=True)

    def dump(self) -> None:
        self._send(signal.SIGURG)

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in [self._agent.pid, *_below(self._agent.pid)]:
            _send_to(pid, number)


def _below(pid: int) -> Iterator[int]:
    """Yield the IDs of all descendants of a process, see proc(5)."""
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


def _send_to(pid: int, number: signal.Signals, *, group: bool = False) -> None:
    try:
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def start_here(
    wrapped: Wrapped, *, workdir: str, log: Path, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child on this machine, in a process group of its own. The kernel kills the child if this process dies."""
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
            pass_fds=descriptors,
        )
