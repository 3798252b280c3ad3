"""Recovery of an interrupted submission: finding out whether it left a job, and recording that job.

A process can be killed (SIGKILL, a crashed machine) between sbatch's reply and the write of the run's record. The
intent that it left (``job_submission``) identifies the run. Its job is found in the queue by the path of its script,
which is in the run directory, or by the files that the job has written there: its lease and its ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import TypeVar

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.progress_notes import show_note_when_slow
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.errors import HpcaccelError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs import local
from hpcaccel.submission.jobs.backend import backend_named
from hpcaccel.submission.jobs.job_submission import (
    Intent,
    JobSubmission,
    SubmitUnderway,
    is_open,
    plain_job_id,
    tasks_of,
)
from hpcaccel.submission.jobs.run_state import cancel_waiting, ledger_sizes, read_record, record_job, record_workers

__all__ = ["SETTLING_SECONDS", "recover", "recover_interrupted", "recover_now", "submission_dir"]

SETTLING_SECONDS = 15.0
"""Maximum time until Slurm's controller shows a job whose sbatch was killed."""
UNLOCKED_SETTLING_SECONDS = 90.0
"""The same time if locks are not available: the sbatch of the killed process may still be running."""
QUERY_TIMEOUT_SECONDS = 20.0
"""Timeout of Slurm's commands in ``recover_now``."""

_UNKNOWN = "its submission was interrupted, and it is unknown whether it has a job"

F = TypeVar("F", bound=Sized)


def submission_dir(run: RunDir) -> RunDir:
    """The directory whose script submits ``run``: the array's folder for a task, the sweep's for a worker."""
    if run.is_worker:
        return SweepDir(run.path.parent.parent)
    return RunDir(run.path.parent.parent) if run.is_task else run


def recover(run: RunDir, *, slurm: Slurm | None = None) -> None:
    """Wait until the outcome of an interrupted submission is known, and record its job if there is one.

    Args:
        run: the run, the sweep or the parent folder of an array.

    Raises:
        ClusterError, SlurmCommandError: the queue cannot be read, so that the outcome is unknown.
    """
    if is_open(run):
        with JobSubmission(run, slurm=slurm) as submission:
            recover_interrupted(submission)


def recover_now(runs: Iterable[RunDir], *, slurm: Slurm | None = None) -> dict[Path, str]:
    """Recover several runs without waiting for their jobs to appear, for commands that only read.

    If Slurm does not respond to a query, no further query is made.

    Returns:
        A dict from the path of each run whose outcome is unknown to the reason, as text for a message.
    """
    failed: SlurmCommandError | None = None
    found = {}
    for run in runs:
        if not is_open(run) or run.path in found:
            continue
        if failed is None:
            try:
                found[run.path] = _recover_now(run, slurm)
                continue
            except SlurmCommandError as error:
                failed = error
        found[run.path] = f"{_UNKNOWN}: {failed}"
    return {path: why for path, why in found.items() if why}


def _recover_now(run: RunDir, slurm: Slurm | None) -> str:
    """Returns why the outcome is unknown, or "" if it is known. Raises SlurmCommandError if Slurm does not respond."""
    if os.stat(run.path).st_uid != os.geteuid():
        return "it is being submitted, or its submission was interrupted: its owner can check with `hpcaccel status`"
    try:
        with JobSubmission(run, slurm=slurm or Slurm(timeout_seconds=QUERY_TIMEOUT_SECONDS), wait=False) as submission:
            recover_interrupted(submission)
    except SubmitUnderway:
        return "it is being submitted"
    except SlurmCommandError:
        raise
    except HpcaccelError as error:
        return f"{_UNKNOWN}: {error}"
    except OSError as error:
        return f"its submission was interrupted, and its job cannot be recorded: {error}"
    return ""


def recover_interrupted(submission: JobSubmission) -> bool:
    """Record the job of an interrupted submission, if it left one, and clear its intent.

    Returns:
        Whether there is such a job.

    Raises:
        ClusterError, SlurmCommandError: the queue cannot be read.
        SubmitUnderway: the job may yet appear in the queue, and ``submission`` does not wait.
    """
    earlier = submission.interrupted()
    if earlier is None:
        return False
    arrived = submission.is_recorded(earlier) or _record_arrived(submission, earlier)
    submission.clear_intent()
    return arrived


def _record_arrived(submission: JobSubmission, earlier: Intent) -> bool:
    run = submission.run
    record = read_record(run)
    if record.kind == "sweep":
        if not (workers := arrived_workers(submission, earlier)):
            return False
        record_workers(
            SweepDir(run.path), workers, offsets=dict(zip(earlier.indices or [], earlier.offsets, strict=True))
        )
        first = workers[min(workers)].partition("_")[0]
    else:
        if not (jobs := arrived_jobs(submission, earlier)):
            return False
        from hpcaccel.submission.jobs.submitit_executor import write_job_pickles  # slow import

        first = jobs[0]
        write_job_pickles(run, first, earlier.indices)
        if jobs[1:]:
            cancel_waiting(submission.slurm, jobs[1:])  # an incomplete chain: record_job submits new followers
        backend = submission.holding(backend_named(record.backend, submission.slurm))
        record_job(run, first, indices=earlier.indices, offsets=earlier.offsets, backend=backend)
    register(run, name=record.name, job_id=first)
    return True


def arrived_jobs(submission: JobSubmission, earlier: Intent) -> list[str]:
    """The jobs of an interrupted submission that are not recorded, oldest first.

    Raises:
        ClusterError, SlurmCommandError: the queue cannot be read.
        SubmitUnderway: the job may yet appear in the queue, and ``submission`` does not wait.
    """
    if read_record(submission.run).backend == "local":
        return sorted({plain_job_id(job_id) for job_id in _local_jobs(submission.run, earlier).values()})
    return sorted(_settled(submission, earlier, _jobs_in_queue), key=int)


def arrived_workers(submission: JobSubmission, earlier: Intent) -> dict[int, str]:
    """The job of each worker of an interrupted sweep submission, by index. Raises the errors of ``arrived_jobs``."""
    if read_record(submission.run).backend == "local":
        return _local_jobs(submission.run, earlier)
    return _settled(submission, earlier, _workers_in_queue)


def _settled(submission: JobSubmission, earlier: Intent, query: Callable[[JobSubmission, Intent], F]) -> F:
    """Repeat ``query`` until it finds a job, or until the controller would have shown one."""
    began = _script_began(submission, earlier)
    most = SETTLING_SECONDS if submission.is_locked else UNLOCKED_SETTLING_SECONDS
    what = f"waiting up to {most:g} s: an earlier submission of {submission.run.run_id} was interrupted"
    with show_note_when_slow(f"{what}, and its job may still appear in the queue"):
        while not (found := query(submission, earlier)) and submission.now() - began <= most:
            if not submission.waits:
                raise SubmitUnderway
            submission.sleep(1.0)
    return found


def _script_began(submission: JobSubmission, earlier: Intent) -> float:
    """The earliest time at which sbatch can have started: the time at which the script was written.

    The script is written after the intent is written and the code is copied. A time in the future counts as now,
    because the file system's clock may be ahead.
    """
    try:
        written = os.stat(submission.run.script).st_mtime
    except OSError:
        return earlier.began
    return max(earlier.began, min(written, submission.now()))


def _jobs_in_queue(submission: JobSubmission, earlier: Intent) -> set[str]:
    run = submission.run
    started = {plain_job_id(job_id) for part in (run, *tasks_of(run)) for job_id in _started_jobs(part)}
    return {*submission.slurm.jobs_of_script(run.script), *started} - earlier.known


def _workers_in_queue(submission: JobSubmission, earlier: Intent) -> dict[int, str]:
    """The new job of each worker, from the queue and, for jobs that have left it, from the workers' accounts."""
    run = submission.run
    started = {index: job_id for index in earlier.indices or () for job_id in _started_jobs(run.task(index))}
    found = {**started, **submission.slurm.workers_of_script(run.script)}
    return {index: job_id for index, job_id in found.items() if plain_job_id(job_id) not in earlier.known}


def _local_jobs(run: RunDir, earlier: Intent) -> dict[int, str]:
    """The jobs of the local backend, by task index (0 for a run that is not an array).

    A process is recorded before its job can start. A process that ended without a line in the ledger did not start the
    job.
    """
    parts = {0: run} if earlier.indices is None else {one: run.task(one) for one in earlier.indices}
    found = {}
    for (index, part), before in zip(parts.items(), earlier.offsets or [0] * len(parts), strict=True):
        process = local.local_process(part)
        if process is None or plain_job_id(process.job_id) in earlier.known:
            continue
        if process.is_alive or not process.is_here or ledger_sizes([part])[0] > before:
            found[index] = process.job_id
    return found


def _started_jobs(run: RunDir) -> list[str]:
    """The jobs that have written to the run directory, oldest first."""
    place = run.account if isinstance(run, WorkerDir) else run.ledger
    found = [str(line["job_id"]) for line, _ in read_lines(place) if line.get("job_id")]
    lease = read_json(run.lease)
    return [*found, *([] if lease is None else [str(lease["job_id"])])]
