"""Who may write to a run directory: one supervisor at a time."""

from __future__ import annotations

import os
import socket
import time

from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import Lease, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir, read_json, write_json
from hpcaccel.errors import ClusterError, RunBusy, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo, QueueEntry

__all__ = ["acquire", "release"]

NAMED_WITHIN_SECONDS = 10.0
"""A job may start before whoever submitted it has written down its number."""


def acquire(run: RunDir, *, job_id: str, restart_count: int, trusted: bool = False) -> None:
    """Take the lease; one of a supervisor that is gone is taken over.

    Args:
        trusted: whoever started this job has made sure that it is the run's, whatever its record says.

    Raises:
        RunBusy: another supervisor is alive, or this job is none of the run's, whose own comes back.
    """
    value = read_json(run.lease)
    if value is not None:
        holder = from_dict(Lease, value)
        if _alive(holder, job_id):
            raise RunBusy(
                f"run {run.run_id} is being written by job {holder.job_id} on {holder.host} (process {holder.pid}). "
                f"Wait for it, or end it with: hpcaccel cancel {run.run_id}"
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
    """A job that somebody handed in by hand may find the lease free while the run's own waits in the queue."""
    patience = time.monotonic() + NAMED_WITHIN_SECONDS
    while (own := _other_job(run, job_id)) is not None and time.monotonic() < patience:
        time.sleep(0.5)
    if own is None:
        return
    job = _known(own)
    if job is not None and not job.state.is_ended:
        raise RunBusy(
            f"run {run.run_id} goes on in job {own}, and job {job_id} is none of its own. "
            f"Wait for it, or end it with: hpcaccel cancel {run.run_id}"
        )


def _other_job(run: RunDir, job_id: str) -> str | None:
    """The run's newest job, where this one is not among its jobs."""
    record = read_json(run.record) or {}
    jobs = record.get("job_ids", [])
    known = {*jobs, *record.get("links", [])}
    return jobs[-1] if jobs and job_id not in known and not job_id.startswith("local-") else None


def release(run: RunDir) -> None:
    """Give the lease back, unless somebody has taken it over from a supervisor that was believed dead."""
    value = read_json(run.lease)
    if value is not None and (value["host"], value["pid"]) == (socket.gethostname(), os.getpid()):
        run.lease.unlink(missing_ok=True)


def _alive(holder: Lease, job_id: str) -> bool:
    if holder.job_id == job_id:
        return _same_job_alive(holder)
    if holder.job_id.startswith("local-"):
        return _process_alive(holder)
    if (job := _known(holder.job_id)) is None:
        # Nobody can say; a job that runs beats a lease that may be stale unless the process is seen to live.
        return _process_alive(holder)
    return job.state.is_running


def _known(job_id: str) -> QueueEntry | JobInfo | None:
    """What Slurm knows of a job at this moment: a queue that does not list it says nothing of it."""
    slurm = Slurm()
    try:
        return slurm.queue([job_id]).get(job_id) or slurm.job(job_id)
    except (ClusterError, SlurmCommandError):
        return None


def _same_job_alive(holder: Lease) -> bool:
    # Slurm never runs a job twice at once, so an earlier incarnation of this very job is gone; only a process that
    # can be seen on this host, and is not us, speaks against it.
    return holder.pid != os.getpid() and _process_alive(holder)


def _process_alive(holder: Lease) -> bool:
    return holder.host == socket.gethostname() and process_start(holder.pid) == holder.pid_start
