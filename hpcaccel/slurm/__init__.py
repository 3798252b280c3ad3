"""Slurm's queries and commands as Python methods, and parsers for their output.

The names below are imported on first use: ranks start from a cold shared file system and need only the parser of host
lists.
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
