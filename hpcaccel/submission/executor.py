"""The seam to submitit: its submission, with our own script, our own call of sbatch and our own view of a job's state.

submitit pickles, submits and hands out jobs; the text that it submits is what ``render`` made, for single jobs and
arrays alike (its own array code would build a plain SlurmExecutor, with submitit's script). Written for submitit 1.5.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from hpcaccel.core.run_dir import RunDir, atomic_write
from hpcaccel.submission import stop_requests
from hpcaccel.submission.run_state import read_facts
from hpcaccel.submission.status import RunStatus, statuses

__all__ = ["RunExecutor", "RunJob"]


class RunPaths(utils.JobPaths):
    """submitit's names, except that what a rank printed lies where the supervisor put it."""

    @property
    def stdout(self) -> Path:
        run = RunDir(self.folder.parent)
        attempts = [int(path.name) for path in run.attempts.iterdir()] if run.attempts.is_dir() else []
        return run.rank_log(max(attempts, default=1), self.task_id or 0)

    @property
    def stderr(self) -> Path:
        return self.stdout


class RunWatcher(SlurmInfoWatcher):
    """Asks about all jobs of this process together, seldom, and through our adapter instead of sacct alone."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s=delay_s)
        self._runs: dict[str, RunDir] = {}
        self._statuses: dict[str, RunStatus] = {}

    def watch(self, job_id: str, run: RunDir) -> None:
        self._runs[job_id] = run
        self.register_job(job_id)

    def update(self) -> None:
        open_jobs = sorted(self._registered - self._finished)
        if not open_jobs:
            return
        self._num_calls += 1
        found = statuses([self._runs[job_id] for job_id in open_jobs], patient=bool(self._statuses))
        self._statuses.update(zip(open_jobs, found, strict=True))
        self._finished.update(job_id for job_id, one in zip(open_jobs, found, strict=True) if one.ended)
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        self.update_if_long_enough(mode)
        known = self._statuses.get(job_id)
        return "UNKNOWN" if known is None else known.state.upper()

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.update_if_long_enough(mode)
        known = self._statuses.get(job_id)
        return known is not None and known.ended


class RunJob(SlurmJob[Any]):
    """submitit's job of a run. It is done when nothing follows by itself: a result that an earlier attempt left, or a
    preemption on the way, does not end it."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = RunPaths(folder, job_id=job_id, task_id=self.task_id)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.paths.folder.parent)

    def _register_in_watcher(self) -> None:
        folder = utils.JobPaths(self._paths._folder, job_id=self.job_id).folder
        self.watcher.watch(self.job_id, RunDir(folder.parent))

    def done(self, force_check: bool = False) -> bool:
        if read_facts(self.run_dir).settled is not None:
            return True
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def cancel(self, check: bool = True) -> None:
        """Cancel the run, so that nothing brings it back. With ``check`` it is an error if it has ended already."""
        if check or not self.done():
            stop_requests.request_cancel(self.run_dir)


class RunExecutor(SlurmExecutor):
    """Submits one run, or the tasks ``indices`` of an array whose parent folder is ``run``.

    Args:
        text: the batch script.
        start: hands the script to a scheduler and returns the job id.
        ranks: of each job.
    """

    job_class = RunJob

    def __init__(
        self,
        run: RunDir,
        *,
        text: str,
        start: Callable[[Path], str],
        ranks: int,
        indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(run.submitit if indices is None else run.tasks / "%a" / run.submitit.name)
        self._run = run
        self._text = text
        self._start = start
        self._ranks = ranks
        self._indices = indices

    @classmethod
    def affinity(cls) -> int:
        return 2  # whether there is a scheduler was asked before

    def _num_tasks(self) -> int:
        return self._ranks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _submit_command(self, command: str) -> Job[Any]:
        return self._job(self._start_script(command))

    def _internal_process_submissions(self, delayed_submissions: Sequence[utils.DelayedSubmission]) -> list[Job[Any]]:
        pickles = []
        try:
            for delayed in delayed_submissions:
                pickles.append(self._dump(delayed))
            if self._indices is None:
                jobs = [self._submit_command(self._submitit_command_str)]
            else:
                job_id = self._start_script(self._submitit_command_str)
                jobs = [self._job(f"{job_id}_{index}") for index in self._indices]
            for job, path in zip(jobs, pickles, strict=True):
                job.paths.move_temporary_file(path, "submitted_pickle")
        finally:
            for path in pickles:
                path.unlink(missing_ok=True)
        return jobs

    def _dump(self, delayed: utils.DelayedSubmission) -> Path:
        path = self._run.path / f".{uuid.uuid4().hex}.pkl"
        delayed.dump(path)
        return path

    def _start_script(self, command: str) -> str:
        atomic_write(self._run.script, self._make_submission_file_text(command, uuid.uuid4().hex))
        return self._start(self._run.script)

    def _job(self, job_id: str) -> RunJob:
        return self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._ranks)))
