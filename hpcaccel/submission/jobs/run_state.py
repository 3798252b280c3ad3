"""The state of a run according to its directory (record, ledger, open requests), and recording of the run's jobs.

A chain is a series of jobs, for sites where a job cannot be requeued. ``submit`` submits the first job together with
its first followers, because a job that is killed at its start must already have a follower. When a job starts, it
submits a further follower (``hpcaccel.node.chain``). Recording a job is idempotent.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.core.durable_files import read_json, read_lines, refuse_newer, write_json
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.stop_requests import StopRequest, open_requests
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import record_dependent, submit_followers
from hpcaccel.submission.jobs.backend import Backend, SlurmBackend

__all__ = [
    "RunState",
    "cancel_waiting",
    "ledger_sizes",
    "links_behind",
    "read_facts",
    "read_record",
    "read_worker_facts",
    "record_job",
    "record_workers",
    "waiting_links",
    "write_record",
]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The record, the ledger and the open requests of a run."""

    run: RunDir
    record: RunRecord
    attempts: int
    """Number of attempts in all jobs of the run."""
    restarts: int
    """Number of attempts that were restarts in the same allocation; for a worker, number of its requeues."""
    started: AttemptStart | None
    """The newest attempt of the newest job, if that attempt has no end in the ledger."""
    last_end: AttemptEnd | None
    """The end of the newest job's last attempt; None if the job has had no attempt, or if its last attempt is open."""
    asked: StopRequest | None
    """The newest stop request that no supervisor has honoured yet."""
    stopping: bool
    """Whether the ranks of the open attempt have a stop request."""

    @property
    def job_id(self) -> str:
        """Id of the newest job. If the record has no job, id of the job that holds the lease, or ""."""
        return self.record.job_ids[-1] if self.record.job_ids else next(iter(self.unrecorded), "")

    @property
    def waiting(self) -> list[str]:
        """The jobs of the run's chain that wait behind the newest job."""
        return waiting_links(self.record)

    @property
    def unrecorded(self) -> list[str]:
        """The job that holds the run's lease, if the job is not in the record. [] for trials: a worker runs them."""
        lease = None if self.run.is_trial else read_json(self.run.lease)
        job_id = "" if lease is None else str(lease["job_id"])
        return [job_id] if job_id and job_id not in (*self.record.job_ids, *self.record.links) else []

    @property
    def settled(self) -> AttemptEnd | None:
        """``last_end`` if no attempt follows it (its decision is ``end`` or ``pause``), else None."""
        end = self.last_end
        return end if end is not None and end.decision in ("end", "pause") else None


def read_record(run: RunDir) -> RunRecord:
    """Read a run's record. Raises RunDirectoryError if ``run`` is not a run directory, or one of a newer hpcaccel."""
    value = read_json(run.record)
    if value is None:
        raise RunDirectoryError(f"{run.path} is not a run directory: it has no {run.record.name}")
    refuse_newer(value, RunRecord.version, run.record)
    return from_dict(RunRecord, value)


def waiting_links(record: RunRecord) -> list[str]:
    """The jobs of a chain that wait behind the newest job of the record."""
    if not record.job_ids or record.job_ids[-1] not in record.links:
        return []
    return record.links[record.links.index(record.job_ids[-1]) + 1 :]


def write_record(run: RunDir, record: RunRecord, *, sync: bool = True) -> None:
    write_json(run.record, to_dict(record), sync=sync)


def read_facts(run: RunDir) -> RunState:
    """Read the state of a run. Raises RunDirectoryError if ``run`` is not a run directory."""
    record = read_record(run)
    ledger = RunLedger.read(run)
    last = RunLedger.read(run, offset=record.ledger_offset).last
    started = last if isinstance(last, AttemptStart) else None
    requests = open_requests(run, of_users=True)
    return RunState(
        run=run,
        record=record,
        attempts=len(ledger.attempts),
        restarts=ledger.restarts,
        started=started,
        last_end=last if isinstance(last, AttemptEnd) else None,
        asked=requests[-1][1] if requests else None,
        stopping=started is not None and run.stop(started.attempt).exists(),
    )


def read_worker_facts(worker: WorkerDir) -> RunState:
    """Read the state of a sweep's worker. Its allocations count as attempts.

    Raises:
        RunDirectoryError: ``worker`` is not the directory of a worker.
    """
    record = read_record(worker)
    count = restarts = 0
    last: AttemptStart | AttemptEnd | None = None
    for line, offset in read_lines(worker.account):
        current = offset > record.ledger_offset
        if line.get("event") == "start":
            count += 1
            last = from_dict(AttemptStart, {**line, "attempt": count}) if current else None
        elif line.get("event") == "end":
            end = from_dict(AttemptEnd, {**line, "attempt": count})
            restarts += end.decision == "requeue"
            last = end if current else None
    requests = [*open_requests(worker.sweep, of_users=True), *open_requests(worker, of_users=True)]
    return RunState(
        run=worker,
        record=record,
        attempts=count,
        restarts=restarts,
        started=last if isinstance(last, AttemptStart) else None,
        last_end=last if isinstance(last, AttemptEnd) else None,
        asked=requests[-1][1] if requests else None,
        stopping=False,
    )


@contextmanager
def links_behind(run: RunDir, job_id: str, *, backend: Backend) -> Iterator[list[str]]:
    """Submit the followers of the new job ``job_id``. They are cancelled if the block fails.

    Yields:
        ``job_id`` and its followers; [] if the run is not a chain.

    Raises the errors of :func:`hpcaccel.slurm.job_dependencies.submit_followers`.
    """
    resilience = ((read_json(run.spec) or {}).get("spec") or {}).get("resilience", {})
    length = resilience.get("chain")
    if length is None or not isinstance(backend, SlurmBackend):
        yield []
        return
    count = min(resilience["chain_ahead"], length - 1)
    followers = submit_followers(backend.slurm, run, behind=[job_id], count=count)
    try:
        yield [job_id, *followers]
    except BaseException:
        cancel_waiting(backend.slurm, followers)
        raise


def cancel_waiting(slurm: Slurm, job_ids: Sequence[str]) -> None:
    """Cancel pending jobs, the last one first. Jobs that have started are not cancelled."""
    for job_id in reversed(job_ids):
        slurm.cancel(job_id, only_pending=True)


def record_job(
    parent: RunDir, job_id: str, *, indices: Sequence[int] | None, offsets: Sequence[int], backend: Backend
) -> None:
    """Record the new job of a run, or of the tasks ``indices`` of an array, and submit its followers.

    Args:
        parent: the run, or the directory of the array.
        offsets: the size in bytes of each ledger before the job was submitted.

    Raises the errors of :func:`hpcaccel.slurm.job_dependencies.submit_followers`.
    """
    tasks = [parent] if indices is None else [parent.task(index) for index in indices]
    for place, task in enumerate(tasks):
        own = job_id if indices is None else f"{job_id}_{indices[place]}"
        with links_behind(task, own, backend=backend) as links:
            _append(task, [own], ledger_offset=offsets[place], links=list(links), sync=indices is None)
    if indices is not None:
        _append(parent, [job_id], ledger_offset=0, links=[])
    _note_dependents(tasks[0], parent, [job_id])


def record_workers(sweep: SweepDir, jobs: Mapping[int, str], *, offsets: Mapping[int, int]) -> None:
    """Record the job of each worker. The directory of a new worker without a job (the queue was full) is removed.

    Args:
        jobs: job ids by worker index.
        offsets: by worker index, the size in bytes of the worker's account before the submission.
    """
    for index in offsets:
        worker = sweep.worker(index)
        if index in jobs:
            _append(worker, [jobs[index]], ledger_offset=offsets[index])
        elif not worker.account.exists():
            shutil.rmtree(worker.path, ignore_errors=True)
    arrays = list(dict.fromkeys(job_id.partition("_")[0] for _, job_id in sorted(jobs.items())))
    _append(sweep, arrays, array_size=len(sweep.worker_indices()))
    _note_dependents(sweep, sweep, arrays)


def ledger_sizes(runs: Sequence[RunDir]) -> list[int]:
    """The size in bytes of the ledger of each run, or of the account of each worker."""
    places = [run.account if isinstance(run, WorkerDir) else run.ledger for run in runs]
    return [place.stat().st_size if place.exists() else 0 for place in places]


def _append(run: RunDir, job_ids: Sequence[str], *, sync: bool = True, **changes: Any) -> None:
    record = read_record(run)
    before = [one for one in record.job_ids if one not in job_ids]  # an interrupted submission may have recorded some
    write_record(run, replace(record, job_ids=[*before, *job_ids], **changes), sync=sync)


def _note_dependents(task: RunDir, run: RunDir, job_ids: Sequence[str]) -> None:
    """Record ``run`` as a dependent in the runs that it waits for."""
    if read_record(run).job_ids != list(job_ids):
        return  # a resume: its dependencies have ended
    launch = find_launch(task)
    for other in (RunDir(one["run"]) for one in ([] if launch is None else launch.after)):
        # Another user's run may be read-only. If it is also a chain, its later jobs are not waited for.
        for job_id in job_ids if os.access(other.path, os.W_OK) else ():
            record_dependent(other, dependent=run, job_id=job_id)
