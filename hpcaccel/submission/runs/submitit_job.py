"""submitit's job object for a run: status, log and cancel use the run directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from submitit.core import utils
from submitit.slurm.slurm import SlurmInfoWatcher

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs.run_state import read_facts
from hpcaccel.submission.jobs.submitit_executor import SubmittedJob
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.status import RunStatus, statuses

__all__ = ["RunJob"]


class RunPaths(utils.JobPaths):
    """submitit's file names, except for the log of a rank, which the supervisor writes."""

    @property
    def stdout(self) -> Path:
        run = RunDir(self.folder.parent)
        attempts = [int(path.name) for path in run.attempts.iterdir()] if run.attempts.is_dir() else []
        return run.rank_log(max(attempts, default=1), self.task_id or 0)

    @property
    def stderr(self) -> Path:
        return self.stdout


class RunWatcher(SlurmInfoWatcher):
    """Queries the states of all jobs of this process together and rarely, through ``statuses`` instead of sacct."""

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


class RunJob(SubmittedJob):
    """submitit's job for a run. The job is done when no further attempt will start automatically.

    A preemption, or the result file of an earlier attempt, does not make the job done.
    """

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
        """Cancel the run, without a requeue.

        Args:
            check: whether to raise UserError if the run has already ended.
        """
        if check or not self.done():
            control.request_cancel(self.run_dir)
