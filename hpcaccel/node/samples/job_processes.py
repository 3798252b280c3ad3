"""The processes of a run on this node: those with the run's directory in their environment, which children inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir

__all__ = ["JobProcesses", "ProcessTotals"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class ProcessTotals:
    """The use of all processes together. CPU time and I/O are counters, which include the use of ended processes."""

    cpu_seconds: float
    memory_bytes: int
    io_read_bytes: int | None
    io_write_bytes: int | None


class JobProcesses:
    """Reads the ranks of ``run`` on this node and their children, see proc(5).

    Args:
        proc: where the kernel's files are.
    """

    def __init__(self, run: RunDir, *, proc: Path = Path("/proc")) -> None:
        self._mark = b"HPCACCEL_RUN_DIR=" + os.fsencode(run.path)
        self._proc, self._user = proc, os.getuid()
        self._ours: set[int] = set()
        self._used: dict[tuple[int, str], tuple[float, int, int]] = {}
        """CPU seconds and bytes of each process at the last look, by id and start time."""
        self._ended = [0.0, 0, 0]
        """Usage of processes that have ended."""
        self._knows_io = True

    def totals(self) -> ProcessTotals:
        """Read all processes of the run on this node, and return their total use so far."""
        memory, used = 0, {}
        for pid in self._find():
            if (found := self._look(pid)) is not None:
                start, size, one = found
                memory += size
                used[pid, start] = one
        for key, one in self._used.items():
            if key not in used:
                self._ended = [before + more for before, more in zip(self._ended, one, strict=True)]
        self._used = used
        cpu, read, written = (sum(column) for column in zip(self._ended, *used.values(), strict=True))
        return ProcessTotals(
            cpu_seconds=round(cpu, 2),
            memory_bytes=memory,
            io_read_bytes=int(read) if self._knows_io else None,
            io_write_bytes=int(written) if self._knows_io else None,
        )

    def rank_of(self, pid: int) -> int | None:
        """The rank that a process belongs to; None if the process is not part of this run, or its rank is unknown."""
        variables = self._environment(pid)
        if self._mark not in variables:
            return None
        text = next((one[5:] for one in variables if one.startswith(b"RANK=")), b"")
        return int(text) if text.isdigit() else None

    def has(self, pid: int) -> bool:
        """Whether the process is part of this run."""
        return self._mark in self._environment(pid)

    def _find(self) -> Iterator[int]:
        pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        self._ours &= pids
        # A process that is not ours may become ours by exec, which is how ranks start.
        for pid in pids - self._ours:
            if self._is_own(pid) and self.has(pid):
                self._ours.add(pid)
        yield from sorted(self._ours)

    def _is_own(self, pid: int) -> bool:
        try:
            return os.stat(self._proc / str(pid)).st_uid == self._user
        except OSError:
            return False

    def _environment(self, pid: int) -> list[bytes]:
        try:
            return (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return []  # it has ended, or is another user's

    def _look(self, pid: int) -> tuple[str, int, tuple[float, int, int]] | None:
        """Start time, memory in bytes, and CPU seconds and bytes read and written; None if the process has ended."""
        folder = self._proc / str(pid)
        try:
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            status = (folder / "status").read_text(errors="replace")
        except OSError:
            return None
        size = sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(_RESIDENT))
        seconds = (int(stat[11]) + int(stat[12])) / _TICKS
        try:
            fields = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
            return stat[19], size, (seconds, int(fields["read_bytes"]), int(fields["write_bytes"]))
        except (OSError, ValueError, KeyError):
            self._knows_io = False  # a kernel without I/O accounting, or a process with another user's rights
            return stat[19], size, (seconds, 0, 0)


_RESIDENT = ("RssAnon:", "RssShmem:")
