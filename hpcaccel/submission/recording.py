"""Writing down which jobs a run has, once they are handed in; again and again with the same outcome."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcaccel.core.run_dir import RunDir, SweepDir, WorkerDir, read_json
from hpcaccel.slurm.job_dependencies import remember_dependent
from hpcaccel.submission.backend import Backend
from hpcaccel.submission.chain_jobs import links_behind
from hpcaccel.submission.run_state import read_record, write_record

__all__ = ["ledger_sizes", "record_job", "record_workers"]


def record_job(
    parent: RunDir, job_id: str, *, indices: Sequence[int] | None, offsets: Sequence[int], backend: Backend
) -> None:
    """Write down the new job of a run, or of the tasks ``indices`` of an array, and hand in what waits behind it.

    Args:
        parent: the run; of tasks the array's folder.
        offsets: where the ledger of each of them ended before the job was handed in.

    Raises as :func:`hpcaccel.submission.chain_jobs.links_behind`.
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
    """Write down which job is which worker's; a worker that there was no room for in the queue leaves no folder.

    Args:
        jobs: by the workers' numbers.
        offsets: where the account of each worker ended before.
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
    """Where the ledger (of a worker: the account) of each run ends."""
    places = [run.account if isinstance(run, WorkerDir) else run.ledger for run in runs]
    return [place.stat().st_size if place.exists() else 0 for place in places]


def _append(run: RunDir, job_ids: Sequence[str], *, sync: bool = True, **changes: Any) -> None:
    record = read_record(run)
    before = [one for one in record.job_ids if one not in job_ids]  # a hand-in that was cut off may have come so far
    write_record(run, replace(record, job_ids=[*before, *job_ids], **changes), sync=sync)


def _note_dependents(task: RunDir, run: RunDir, job_ids: Sequence[str]) -> None:
    """Let the runs that are waited for know who waits."""
    if read_record(run).job_ids != list(job_ids):
        return  # a resume: what it waited for is over
    after = (read_json(task.spec) or {}).get("launch", {}).get("after", [])
    for other in (RunDir(one["run"]) for one in after):
        # In somebody else's directory nothing is written: a chain of his is not followed beyond the jobs that it has.
        for job_id in job_ids if os.access(other.path, os.W_OK) else ():
            remember_dependent(other, dependent=run, job_id=job_id)
