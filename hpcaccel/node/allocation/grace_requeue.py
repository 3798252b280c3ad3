"""Whether Slurm itself brings a job back that it has told to go, once its batch script ends in the grace time.

From 24.05 on a job keeps a mark from the beginning of its grace time (GRACE_PREEMPT; slurmctld's job_complete). When
its batch script ends, with whatever code, Slurm requeues it and clears the mark. ``scontrol requeue`` leaves the mark:
the end of the next start would be taken for the preemption's, and the job be started once more.

Slurm counts the requeues at a script's end, and holds the job at the MaxBatchRequeue-th one ("launch failure limit
exceeded requeued held"). It does not count ``scontrol requeue``, which therefore takes over in time.
"""

from __future__ import annotations

import re

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo

__all__ = ["requeued_at_its_end"]

FIRST_RELEASE = (24, 5)
MAX_BATCH_REQUEUE = 5
"""Slurm's default."""


def requeued_at_its_end(slurm: Slurm, job: JobInfo) -> bool:
    """False also where Slurm does not say enough to be sure: a job that nobody requeues would be lost."""
    if job.preempt_time is None or not job.state.is_running or not job.requeue:
        return False
    try:
        config = slurm.config()
        if _release(config.get("SLURM_VERSION", "")) < FIRST_RELEASE:
            return False
        return _may_end_again(job, config) and _preempt_mode(slurm, job, config) == "REQUEUE"
    except (ClusterError, SlurmCommandError):
        return False


def _may_end_again(job: JobInfo, config: dict[str, str]) -> bool:
    """Whether this end of the script, and that of the extra start behind a later ``scontrol requeue``, stay below the
    limit. Slurm does not show its count, which is never more than the job's restarts."""
    limit = config.get("MaxBatchRequeue", "")
    return job.restarts + 2 < (int(limit) if limit.isdecimal() else MAX_BATCH_REQUEUE)


def _release(version: str) -> tuple[int, int]:
    """``26.11.0-0rc1`` → (26, 11); (0, 0) for anything else."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _preempt_mode(slurm: Slurm, job: JobInfo, config: dict[str, str]) -> str:
    """How this job is preempted: its partition's or its QOS's mode, else the cluster's (slurm.conf(5), PreemptMode)."""
    kind, mode = config.get("PreemptType", ""), ""
    if kind.endswith("partition_prio"):
        mode = next((one.preempt_mode for one in slurm.partitions() if one.name == job.partition), "")
    elif kind.endswith("qos") and job.qos:
        row = next((row for row in slurm.qos_table() or [] if row.get("Name") == job.qos), None)
        if row is None:
            return ""  # the accounting does not answer here
        mode = row.get("PreemptMode", "")
    words = ((mode if mode.lower() != "cluster" else "") or config.get("PreemptMode", "")).upper().split(",")
    return next((word for word in words if word not in ("GANG", "WITHIN")), "")
