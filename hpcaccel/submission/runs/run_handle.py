"""Handle to a submitted run: status, wait, result, stop, save, resume."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunFailed, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.calls import call_failure
from hpcaccel.submission.jobs.run_state import read_facts, read_record, read_worker_facts
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.base_handle import Handle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from submitit import Job

__all__ = ["AnyRun", "Run", "RunArray", "SweepRun", "open_run"]

RESULT_SECONDS = 15.0
"""Time for which ``result`` waits for the result file of a completed run."""
_DONE = ("completed", "pruned")


class Run(Handle):
    """Handle to a submitted run, in one job or several: status, wait, result, stop, resume.

    ``submit`` and ``find_run`` return one; it can also be opened by its directory, in another process or later.

    Args:
        path: the run directory.
        slurm: calls Slurm's programs; default: those on ``PATH``.
        is_known: whether ``path`` is known to be a run directory, so that it is not checked.

    Raises:
        RunDirectoryError: ``path`` is not a run directory.

    Example::

        run = hpcaccel.submit("job.yaml", cluster="local")
        if run.wait().state == "failed":
            print(run.log(rank=0).read_text())
    """

    @property
    def job(self) -> Job[Any]:
        """submitit's job object for the newest job."""
        from hpcaccel.submission.runs.submitit_job import RunJob

        return RunJob(folder=self.dir.submitit, job_id=self.job_id, tasks=list(range(self.ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks if the run starts with its smallest number of nodes."""
        return read_launch(self.dir).ranks

    def log(self, rank: int = 0, *, attempt: int | None = None) -> Path:
        """The path of a rank's log file. The file is missing if the rank has not started.

        Args:
            rank: the rank, from 0.
            attempt: number of the attempt, from 1; default: the newest.
        """
        return self.dir.rank_log(attempt or max(1, read_facts(self.dir).attempts), rank)

    def result(
        self, timeout: float | None = None, *, timeout_seconds: float | None = None, progress: bool | None = None
    ) -> Any:
        """Wait, then return the value that the function returned on rank 0; None for scripts and commands.

        Args:
            timeout: in seconds, as in ``concurrent.futures``; ``timeout_seconds`` is the same.
            progress: as in ``wait``.

        Raises:
            RunFailed: the run did not complete or has no result. The error has the function's traceback, if any.
            TimeoutError: the run has not ended within ``timeout``.
        """
        ended = self.wait(timeout, timeout_seconds=timeout_seconds, progress=progress)
        outcome, value = "success", None
        if read_launch(self.dir).callable:
            outcome, value = self._read_result(patience_seconds=RESULT_SECONDS if ended.state in _DONE else 0)
        if ended.state in _DONE and outcome == "success":
            return value
        why = f": {ended.detail}" if ended.detail else ""
        if outcome == "missing" and ended.state in _DONE:
            why = f", but its result file {value} is missing"
        if outcome == "error" and (sentence := call_failure(str(value))) is not None:
            raise RunFailed(f"run {self.run_id} is {ended.state}: {sentence}. Log: {self.log()}")
        trace = f"\nTraceback of rank 0:\n{value}" if outcome == "error" else ""
        raise RunFailed(f"run {self.run_id} is {ended.state}{why}. Log: {self.log()}{trace}")

    def _outcome(self) -> Any:
        return self.result(progress=False)

    def plot(self, metric: str | Sequence[str] | None = None) -> Figure:
        """Draw the curves of logged metrics, with a mark where each later attempt resumed.

        Steps that a later attempt repeated are drawn in grey. In a notebook, the figure is shown as a picture.

        Args:
            metric: one name or several, each with its own axes. Default: ``loss``, or else the first logged metric.

        Returns:
            A matplotlib figure, which is independent of pyplot.

        Raises:
            UserError: the run has not logged this metric, or none yet; or matplotlib is not installed.
        """
        try:
            from hpcaccel.submission.runs.run_plot import plot_run
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            raise UserError(
                f"plot() needs matplotlib, which is not installed for {sys.executable}: pip install 'hpcaccel[plot]'"
            ) from None
        return plot_run(self.dir, metric, name=self.name)

    def _read_result(self, *, patience_seconds: float) -> tuple[str, Any]:
        """Returns the call's outcome (``success``, ``error``, ``missing``) and value. NFS may show the file late."""
        path = self.job.task(0).paths.result_pickle
        deadline = time.monotonic() + patience_seconds
        while not path.exists():
            if time.monotonic() >= deadline:
                return "missing", path
            os.scandir(path.parent).close()  # on NFS, listing the folder refreshes the client's cache
            time.sleep(0.5)
        outcome, value = pickle.loads(path.read_bytes())  # noqa: S301 - our own file
        return str(outcome), value


class RunArray(Handle):
    """The tasks of an array, each of which is a run."""

    def __len__(self) -> int:
        return self.record.array_size or 0

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def runs(self) -> Sequence[Run]:
        """The tasks by index."""
        return [Run(self.dir.task(index).path, slurm=self._slurm) for index in range(len(self))]

    @property
    def jobs(self) -> list[Job[Any]]:
        """submitit's job objects, by index."""
        return [run.job for run in self.runs]

    def results(
        self, timeout: float | None = None, *, timeout_seconds: float | None = None, progress: bool | None = None
    ) -> list[Any]:
        """Wait for all tasks and return what rank 0 of each returned. Arguments and errors as in ``Run.result``."""
        self.wait(timeout, timeout_seconds=timeout_seconds, progress=progress)
        return [run.result(progress=False) for run in self.runs]

    def _outcome(self) -> list[Any]:
        return self.results(progress=False)

    @property
    def _look_seconds(self) -> float:
        return max(super()._look_seconds, len(self) / 100)  # each check reads a file per task

    def _settled(self) -> bool:
        return all(read_facts(self.dir.task(index)).settled is not None for index in range(len(self)))


class SweepRun(Handle):
    """A sweep as an array of workers; its trials are in ``hpcaccel.sweeps.Sweep``."""

    def __init__(self, path: str | os.PathLike[str], *, slurm: Slurm | None = None, is_known: bool = False) -> None:
        super().__init__(path, slurm=slurm, is_known=is_known)
        self.dir: SweepDir = SweepDir(path)

    def resume(self) -> None:
        raise UserError(f"{self.run_id} is a sweep: resume it with `hpcaccel sweep resume {self.run_id}`")

    def stop(self, then: control.Then = "pause") -> None:
        """Stop the trials after a save."""
        if then != "pause":
            raise UserError(
                f"{self.run_id} is a sweep, which does not support {then!r}. Pause it with "
                f"`hpcaccel stop {self.run_id}`, or cancel it with `hpcaccel cancel {self.run_id}`"
            )
        super().stop(then)

    @property
    def _look_seconds(self) -> float:
        return max(super()._look_seconds, (self.record.array_size or 0) / 100)

    def _settled(self) -> bool:
        workers = (self.dir.worker(index) for index in range(self.record.array_size or 0))
        return all(read_worker_facts(worker).settled is not None for worker in workers)


AnyRun = Run | RunArray | SweepRun


def open_run(path: str | os.PathLike[str], *, slurm: Slurm | None = None) -> AnyRun:
    """Open the run, array or sweep in the directory ``path``.

    Raises:
        RunDirectoryError: ``path`` is not a run directory.
    """
    record = read_record(RunDir(path))
    if record.kind == "sweep":
        return SweepRun(path, slurm=slurm)
    if record.array_size is not None:
        return RunArray(path, slurm=slurm)
    return Run(path, slurm=slurm)
