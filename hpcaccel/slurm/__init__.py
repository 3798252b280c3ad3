"""Slurm, as the rest of the house sees it: the only callers of its programs, and what their answers mean."""

from __future__ import annotations

from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import AccountingEntry, Association, JobInfo, JobState, PartitionInfo, QueueEntry

__all__ = ["AccountingEntry", "Association", "JobInfo", "JobState", "PartitionInfo", "QueueEntry", "Slurm"]
