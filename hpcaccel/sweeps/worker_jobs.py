"""Jobs of a sweep's workers: submits them as job arrays, records them, and finds workers whose job is gone.

Slurm limits the highest index of an array (MaxArraySize). A QOS or an association limits the number of a user's queued
jobs, and each array task counts as a job. Beyond the first limit there are several arrays: the script's argument is an
offset, and a worker's number is the offset plus its array index. Beyond the second limit there are fewer workers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpcaccel.core.durable_files import read_json, read_lines, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import RunRecord, WorkerStart, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.error_messages import submit_limit
from hpcaccel.slurm.queue_cache import Queue
from hpcaccel.submission.jobs import local
from hpcaccel.submission.jobs.backend import Backend, SlurmBackend, largest_array, ranges, take_back
from hpcaccel.submission.jobs.job_submission import JobSubmission
from hpcaccel.submission.jobs.local import local_process
from hpcaccel.submission.jobs.run_state import ledger_sizes, read_record, record_workers

__all__ = ["WorkerArrays", "arrays_of", "chunks", "gone_for_good", "hand_in_workers", "make_worker"]


@dataclass
class WorkerArrays:
    """The workers ``indices`` of a sweep, submitted by ``backend``, and the job of each."""

    backend: Backend
    indices: Sequence[int]
    jobs: dict[int, str] = field(default_factory=dict)
    """The job of each submitted worker: ``46_3``, or ``local-1b2c3d4e_3`` on the local backend."""
    refusal: str = ""
    """Why fewer workers were submitted than requested; empty if all were submitted."""
    name: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        self.name = self.backend.name

    @property
    def array_ids(self) -> list[str]:
        return list(dict.fromkeys(job_id.partition("_")[0] for job_id in self.jobs.values()))

    def check(self) -> None:
        self.backend.check()

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        """Submit the workers.

        Returns:
            The id of the first array.

        Raises:
            ClusterError: Slurm rejects the workers for a reason other than a job limit, or the limit allows no job.
        """
        assert isinstance(run, SweepDir)
        try:
            if isinstance(self.backend, SlurmBackend):
                self._submit(self.backend, script)
            else:
                self.jobs = local.start_workers(run, script, self.indices)
        except BaseException:
            self.discard(run, "")
            raise
        return self.array_ids[0]

    def discard(self, run: RunDir, job_id: str) -> None:
        """Cancel the jobs of all workers."""
        if isinstance(self.backend, SlurmBackend):
            for array_id in self.array_ids:
                take_back(self.backend.slurm, array_id)
            return
        assert isinstance(run, SweepDir)
        for index in self.indices:
            local.kill(run.worker(index))

    def _submit(self, backend: SlurmBackend, script: Path) -> None:
        most = _largest_array(backend.slurm)
        waiting = chunks(self.indices, most)
        while waiting:
            piece, *waiting = waiting
            try:
                self._submit_array(backend, script, piece, offset=piece[0] // most * most)
            except ClusterError as error:
                limit = submit_limit(str(error))
                if limit is None or (len(piece) == 1 and not self.jobs):
                    raise
                self.refusal = limit
                half = len(piece) // 2
                waiting = [piece[:half], piece[half:], *waiting] if half else []

    def _submit_array(self, backend: SlurmBackend, script: Path, indices: Sequence[int], *, offset: int) -> None:
        # these options override the script's own lines, which apply to all workers
        options = [f"--array={ranges([index - offset for index in indices])}", *backend.options]
        if offset:
            # With an offset, %a would name another worker's folder, so the script redirects its own output.
            options.append("--output=/dev/null")
        array_id = backend.slurm.sbatch(script, options, words=[str(offset)] if offset else [])
        self.jobs |= {index: f"{array_id}_{index - offset}" for index in indices}


def _largest_array(slurm: Slurm) -> int:
    """Number of tasks that one array may have. Raises SlurmUnreachable rather than SlurmCommandError if Slurm does not
    respond, because nothing has been submitted yet."""
    try:
        return largest_array(slurm.config())
    except SlurmCommandError as error:
        raise SlurmUnreachable(error.command, error.returncode, error.stderr) from None


def chunks(indices: Sequence[int], most: int) -> list[list[int]]:
    """Split ``indices`` into arrays, in order: indices below ``most``, then those below twice ``most``, and so on."""
    found: dict[int, list[int]] = {}
    for index in sorted(indices):
        found.setdefault(index // most, []).append(index)
    return list(found.values())


def hand_in_workers(
    sweep: SweepDir,
    arrays: WorkerArrays,
    *,
    submission: JobSubmission,
    text: str | None = None,
    again: str = "Running the same command again",
) -> None:
    """Submit workers whose folders exist, and record the job of each.

    Args:
        text: the batch script; None for the one in the sweep's directory.
        again: what the user does to continue if Slurm does not confirm the submission; it becomes the subject of a
            sentence in the error message.
    """
    offsets = ledger_sizes([sweep.worker(index) for index in arrays.indices])

    def record_jobs(_: str) -> None:
        record_workers(sweep, arrays.jobs, offsets=dict(zip(arrays.indices, offsets, strict=True)))

    submission.submit(arrays, text=text, record=record_jobs, again=again)


def arrays_of(sweep: SweepDir, backend: Backend) -> WorkerArrays:
    """The workers of a sweep, each with the newest job that was recorded for it."""
    jobs = {index: read_record(sweep.worker(index)).job_ids for index in sweep.worker_indices()}
    return WorkerArrays(backend, list(jobs), {index: job_ids[-1] for index, job_ids in jobs.items() if job_ids})


def make_worker(worker: WorkerDir, record: RunRecord, *, run_id: str) -> None:
    """Create the folder of a new worker; ``record`` is the sweep's record."""
    worker.prepare()
    own = replace(record, kind="run", run_id=run_id, array_size=None, packages={}, job_ids=[])
    write_json(worker.record, to_dict(own), sync=False)
    program = worker.path / worker.node_program.name
    program.symlink_to(Path("..", "..", worker.node_program.name))


def gone_for_good(sweep: SweepDir, workers: Collection[int], slurm: Slurm, *, at_once: bool = False) -> set[int]:
    """The ``workers`` whose job or local process has ended for good. Requeued and unknown jobs do not count as ended.

    Args:
        at_once: whether to query Slurm now, even if another of the user's processes has a recent result.
    """
    jobs = {worker: job for worker in workers if (job := _newest_job(sweep.worker(worker)))}
    local = {worker for worker, job in jobs.items() if job.startswith("local-")}
    submitted = {job: _submitted(sweep.worker(worker)) for worker, job in jobs.items() if worker not in local}
    answer = Queue(slurm).look(submitted, submitted=submitted, after=time.time() if at_once else 0.0)
    # A job seen as ended earlier may have been requeued since, so an outdated result is ignored.
    ended = set() if answer.note else {job for job, known in answer.jobs.items() if known.gone or known.state.is_ended}
    return {
        worker
        for worker, job in jobs.items()
        if (_process_gone(sweep.worker(worker)) if worker in local else job in ended)
    }


def _newest_job(worker: WorkerDir) -> str:
    """The job submitted last for a worker, whether or not it has started; empty if none is known."""
    jobs = (read_json(worker.record) or {}).get("job_ids", [])
    start = _newest_start(worker)
    return str(jobs[-1]) if jobs else "" if start is None else start.job_id


def _newest_start(worker: WorkerDir) -> WorkerStart | None:
    lines = [line for line, _ in read_lines(worker.account) if line.get("event") == "start"]
    return from_dict(WorkerStart, lines[-1]) if lines else None


def _process_gone(worker: WorkerDir) -> bool:
    process = local_process(worker)
    if process is not None:
        return process.is_here and not process.is_alive
    start = _newest_start(worker)
    return start is not None and start.host == socket.gethostname() and process_start(start.pid) != start.pid_start


def _submitted(worker: WorkerDir) -> float:
    """Latest possible submission time of a worker's newest job (seconds since the epoch); 0.0 if not known."""
    try:
        return os.stat(worker.record).st_mtime
    except OSError:
        return 0.0
