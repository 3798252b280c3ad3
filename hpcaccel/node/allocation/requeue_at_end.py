"""Whether Slurm requeues a preempted job by itself when its batch script ends."""

from __future__ import annotations

import re

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo

__all__ = ["requeued_at_its_end"]

FIRST_RELEASE = (24, 5)
"""The first release that requeues a preempted job at the end of its batch script."""
MAX_BATCH_REQUEUE = 5
"""Slurm's default for MaxBatchRequeue."""


def requeued_at_its_end(slurm: Slurm, job: JobInfo) -> bool:
    """Whether Slurm will requeue this preempted job at the end of its batch script. False if the configuration leaves
    any doubt, because the run would not continue if Slurm did not requeue the job."""
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
    """Whether Slurm's count of requeues stays below MaxBatchRequeue at this end of the script, and at the end of the
    extra start that a later ``scontrol requeue`` causes. Slurm does not show this count, which is at most the job's
    number of restarts."""
    limit = config.get("MaxBatchRequeue", "")
    return job.restarts + 2 < (int(limit) if limit.isdecimal() else MAX_BATCH_REQUEUE)


def _release(version: str) -> tuple[int, int]:
    """The release as two numbers, such as (26, 11) for ``26.11.0-0rc1``; (0, 0) if ``version`` does not begin with a
    release."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _preempt_mode(slurm: Slurm, job: JobInfo, config: dict[str, str]) -> str:
    """The PreemptMode for this job: that of its partition or QOS, else that of the cluster, see slurm.conf(5); empty
    if unknown."""
    kind, mode = config.get("PreemptType", ""), ""
    if kind.endswith("partition_prio"):
        mode = next((one.preempt_mode for one in slurm.partitions() if one.name == job.partition), "")
    elif kind.endswith("qos") and job.qos:
        row = next((row for row in slurm.qos_table() or [] if row.get("Name") == job.qos), None)
        if row is None:
            return ""  # no accounting available
        mode = row.get("PreemptMode", "")
    words = ((mode if mode.lower() != "cluster" else "") or config.get("PreemptMode", "")).upper().split(",")
    return next((word for word in words if word not in ("GANG", "WITHIN")), "")
