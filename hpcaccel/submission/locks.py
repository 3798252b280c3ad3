"""Locks by which two processes of a user do one thing after the other. Each goes with the process that took it."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
from pathlib import Path

from hpcaccel.slurm.commands import Slurm

__all__ = ["slurm_holding", "take"]


def take(path: Path) -> int:
    """Wait for the lock ``path``, which is made where it is missing; its descriptor, to be closed to give it back."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def slurm_holding(lock: int) -> Slurm:
    """Slurm, whose commands hold the lock as long as they run, even when this process has been killed."""
    return Slurm(functools.partial(subprocess.run, pass_fds=(lock,)))
