"""Identity of a process across nodes and time. A process id alone is ambiguous: it is reused and node-local."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["node_name", "process_start", "started_at"]


def node_name() -> str:
    """Inside a job, Slurm's name for this node; elsewhere, the short host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def process_start(pid: int) -> int | None:
    """Start time of a process on this host in clock ticks since boot, see proc(5); None if the process has exited."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name is in parentheses and may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def started_at(pid: int) -> float | None:
    """Start time of a process on this host in seconds since the epoch (exec(2) does not change it); None if the
    process has exited."""
    ticks = process_start(pid)
    if ticks is None:
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
