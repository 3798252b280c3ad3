"""The log of one process, which it opens by the number that it has: a rank's shim, a node's torchrun, a component."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["log_to"]


def log_to(path: Path) -> None:
    """Let what this process and those that it starts print be in ``path``, behind what is there: of an attempt that is
    started twice, or what this node's slurmstepd, which has the same file open, writes about the task."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    if log not in (1, 2):
        os.close(log)
