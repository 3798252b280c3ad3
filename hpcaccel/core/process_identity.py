"""Which process is meant by a number that was written down: a process id alone is used again, and on every node."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["node_name", "process_start", "started_at"]


def node_name() -> str:
    """This node as Slurm calls it, inside a job; elsewhere the host's short name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def process_start(pid: int) -> int | None:
    """Start time of a process of this host in clock ticks since boot, see proc(5); None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name stands in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def started_at(pid: int) -> float | None:
    """The same in seconds since the epoch; what a process became by exec(2) counts from its first program on."""
    ticks = process_start(pid)
    if ticks is None:
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
