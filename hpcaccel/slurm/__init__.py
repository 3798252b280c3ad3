"""Slurm, as the rest of the house sees it: the only callers of its programs, and what their answers mean.

The names below are imported when they are first used: ranks and supervisors, which start from a cold shared file
system, read lists of hosts and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.slurm.states import AccountingEntry, Association, JobInfo, JobState, PartitionInfo, QueueEntry

__all__ = ["AccountingEntry", "Association", "JobInfo", "JobState", "PartitionInfo", "QueueEntry", "Slurm"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcaccel.slurm' has no attribute {name!r}")
    value = getattr(import_module("hpcaccel.slurm.commands" if name == "Slurm" else "hpcaccel.slurm.states"), name)
    globals()[name] = value
    return value
