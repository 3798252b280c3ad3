"""Whether the runs that come before this one have ended as they should: asked once, when its first job starts."""

from __future__ import annotations

import time

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.launch_spec import Launch
from hpcaccel.slurm.job_dependencies import ended_well

__all__ = ["hindrance"]

PATIENCE_SECONDS = 20.0
"""Slurm may start a job a moment before the other's last line is seen through a shared file system."""


def hindrance(launch: Launch) -> str:
    """Why this run is not to start, in a sentence; empty where nothing speaks against it.

    Slurm has seen to it that those runs are over. Whether a chain has ended well it cannot tell, and an array has no
    ledger of its own, so that Slurm's word counts.
    """
    for one in launch.after:
        kind, other = one["kind"], RunDir(one["run"])
        if kind == "afterany" or not other.record.exists() or other.tasks.exists():
            continue
        end = time.monotonic() + PATIENCE_SECONDS
        while kind == "afterok" and not ended_well(other) and time.monotonic() < end:
            time.sleep(1.0)
        if ended_well(other) != (kind == "afterok"):
            how = "has ended well" if kind == "afternotok" else "has not ended well"
            return f"{kind}: run {other.run_id} {how}"
    return ""
