"""The lease of a run directory: only one supervisor at a time may write to it."""

from __future__ import annotations

import os
import socket
import time

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import Lease, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, RunBusy, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo, QueueEntry

__all__ = ["acquire", "release"]

NAMED_WITHIN_SECONDS = 10.0
"""How long to wait until the run's record lists this job. A job may start before the submitting command has recorded
its ID."""


def acquire(run: RunDir, *, job_id: str, restart_count: int, trusted: bool = False) -> None:
    """Take the lease. If a supervisor ended without releasing it, take it over.

    Args:
        trusted: do not check in the run's record that this job belongs to the run, because the caller has checked it.

    Raises:
        RunBusy: another supervisor of the run is alive; or this job does not belong to the run, and a job of the run
            is pending or running.
    """
    value = read_json(run.lease)
    if value is not None:
        holder = from_dict(Lease, value)
        if _alive(holder, job_id):
            raise RunBusy(
                f"run {run.run_id} is in use by job {holder.job_id} on {holder.host} (process {holder.pid}). "
                f"Wait until it has ended, or cancel it with: hpcaccel cancel {run.run_id}"
            )
    if not trusted:
        _refuse_a_stranger(run, job_id)
    lease = Lease(
        job_id=job_id,
        restart_count=restart_count,
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_start=process_start(os.getpid()) or 0,
        time=time.time(),
    )
    write_json(run.lease, to_dict(lease))


def _refuse_a_stranger(run: RunDir, job_id: str) -> None:
    """Raise RunBusy if ``job_id`` is not a job of the run, such as one submitted by hand, and the run's own job is
    pending or running."""
    patience = time.monotonic() + NAMED_WITHIN_SECONDS
    while (own := _other_job(run, job_id)) is not None and time.monotonic() < patience:
        time.sleep(0.5)
    if own is None:
        return
    job = _known(own)
    if job is not None and not job.state.is_ended:
        raise RunBusy(
            f"run {run.run_id} continues in job {own}, and job {job_id} does not belong to it. "
            f"Wait until job {own} has ended, or cancel it with: hpcaccel cancel {run.run_id}"
        )


def _other_job(run: RunDir, job_id: str) -> str | None:
    """The ID of the run's newest job if ``job_id`` is a Slurm job that does not belong to the run; else None."""
    record = read_json(run.record) or {}
    jobs = record.get("job_ids", [])
    known = {*jobs, *record.get("links", [])}
    return jobs[-1] if jobs and job_id not in known and not job_id.startswith("local-") else None


def release(run: RunDir) -> None:
    """Remove the lease, unless another supervisor has taken it over."""
    value = read_json(run.lease)
    if value is not None and (value["host"], value["pid"]) == (socket.gethostname(), os.getpid()):
        run.lease.unlink(missing_ok=True)


def _alive(holder: Lease, job_id: str) -> bool:
    if holder.job_id == job_id:
        return _same_job_alive(holder)
    if holder.job_id.startswith("local-"):
        return _process_alive(holder)
    if (job := _known(holder.job_id)) is None:
        # The holder's job is unknown to Slurm. Take the lease unless the holder's process runs on this host.
        return _process_alive(holder)
    return job.state.is_running


def _known(job_id: str) -> QueueEntry | JobInfo | None:
    """What Slurm reports about a job; None if Slurm has no record of it or does not respond. A job that squeue does not
    list may still exist, so scontrol is queried too."""
    slurm = Slurm()
    try:
        return slurm.queue([job_id]).get(job_id) or slurm.job(job_id)
    except (ClusterError, SlurmCommandError):
        return None


def _same_job_alive(holder: Lease) -> bool:
    # Slurm starts a job again only if the earlier start has ended, or if Slurm considers its node dead. So the earlier
    # start counts as alive only if its process is found on this host.
    return holder.pid != os.getpid() and _process_alive(holder)


def _process_alive(holder: Lease) -> bool:
    return holder.host == socket.gethostname() and process_start(holder.pid) == holder.pid_start
