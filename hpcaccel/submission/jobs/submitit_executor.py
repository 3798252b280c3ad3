"""submitit's executor, with hpcaccel's script and sbatch call; and the pickles that submitit opens on the ranks.

submitit pickles the calls, submits the script, and renames each pickle so that its name contains the job id. The script
is the text from ``render``, for single jobs and arrays alike (submitit's own array code would write its own script).
Written for submitit 1.5.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpcaccel.core.durable_files import atomic_write
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.calls import FUNCTION_FILE, FunctionCall, ProgramStub

__all__ = ["RunExecutor", "SubmittedJob", "write_job_pickles"]


class SubmittedJob(SlurmJob[Any]):
    """A job that was just submitted: its id and the paths of its files. submitit does not watch it."""

    def _register_in_watcher(self) -> None:
        pass


class RunExecutor(SlurmExecutor):
    """Submits one run, or the tasks ``indices`` of an array whose parent folder is ``run``.

    Args:
        text: the text of the batch script; None for the script in the run directory.
        start: submits the script to a scheduler and returns the job id.
    """

    job_class = SubmittedJob

    def __init__(
        self,
        run: RunDir,
        *,
        text: str | None,
        start: Callable[[Path], str],
        indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(run.submitit if indices is None else run.tasks / "%a" / run.submitit.name)
        self._run = run
        self._text = run.script.read_text(encoding="utf-8") if text is None else text
        self._start = start
        self._indices = indices
        self._tasks = [run] if indices is None else [run.task(index) for index in indices]
        self._ranks = read_launch(self._tasks[0]).ranks

    def write_calls(self) -> None:
        """Write the pickled calls of a Python function before there is a job id: the supervisor needs them even if
        this process is killed before sbatch replies."""
        for task in self._tasks:
            if isinstance(call := _call_of(task), FunctionCall):
                _write_pickle(call, task.call)

    def submit_tasks(self) -> None:
        """Submit the script once and write a pickle for each task."""
        self._internal_process_submissions([utils.DelayedSubmission(_call_of(task)) for task in self._tasks])

    @classmethod
    def affinity(cls) -> int:
        return 2  # the backend has checked that there is a scheduler

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

    def _job(self, job_id: str) -> Job[Any]:
        return self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._ranks)))


def write_job_pickles(run: RunDir, job_id: str, indices: Sequence[int] | None) -> None:
    """Write the pickles of a job whose submission was interrupted. Keeps existing pickles, deletes temporary ones."""
    for left in run.path.glob(".*.pkl"):
        left.unlink(missing_ok=True)
    for index in [None] if indices is None else indices:
        task, own = (run, job_id) if index is None else (run.task(index), f"{job_id}_{index}")
        path = task.submitit / f"{own}_submitted.pkl"
        if not path.exists():
            _write_pickle(_call_of(task), path)


def _call_of(run: RunDir) -> FunctionCall | ProgramStub:
    if not read_launch(run).callable:
        return ProgramStub(str(run.path))
    code = run.code if run.code.exists() else None
    return FunctionCall(str(run.submitit / FUNCTION_FILE), None if code is None else str(code))


def _write_pickle(call: FunctionCall | ProgramStub, path: Path) -> None:
    temporary = path.with_suffix(".pkl.tmp")
    utils.DelayedSubmission(call).dump(temporary)
    temporary.rename(path)
