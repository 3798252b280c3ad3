"""Paths of the files in a sweep's directory and in its workers' folders."""

from __future__ import annotations

from pathlib import Path

from hpcaccel.core.durable_files import DIRECTORY_MODE, make_folder, same_sharing
from hpcaccel.core.run_dir import RunDir, cannot_make, numbered_folders

__all__ = ["SweepDir", "WorkerDir"]


class SweepDir(RunDir):
    """Paths inside a sweep's directory: a run directory with workers and trials in place of attempts."""

    @property
    def spec_yaml(self) -> Path:
        return self.path / "sweep.yaml"

    @property
    def spec(self) -> Path:
        return self.sweep

    @property
    def tasks(self) -> Path:
        """Folder of the workers, which are the tasks of the sweep's arrays."""
        return self.workers

    def task(self, index: int) -> RunDir:
        return self.worker(index)

    @property
    def sweep(self) -> Path:
        """The resolved spec, the ``sweep`` section, and the command that starts a worker's tuner."""
        return self.path / "sweep.json"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def worker(self, index: int) -> WorkerDir:
        return WorkerDir(self.workers / str(index))

    def worker_indices(self) -> list[int]:
        """Indices of the workers that have a folder, ascending."""
        return numbered_folders(self.workers)

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    def trial(self, number: int) -> RunDir:
        return RunDir(self.trials / str(number))

    def trial_numbers(self) -> list[int]:
        """Numbers of the trials that have a folder, ascending."""
        return numbered_folders(self.trials)

    def create(self) -> None:
        """Create the directory and its folders.

        Raises:
            RunDirectoryError: the directory exists already or cannot be created.
        """
        try:
            self.path.mkdir(parents=True, mode=DIRECTORY_MODE, exist_ok=False)
            for folder in (self.workers, self.trials, self.control):
                folder.mkdir(mode=DIRECTORY_MODE)
        except OSError as error:
            raise cannot_make(self.path, error) from None


class WorkerDir(RunDir):
    """One worker's folder. Like a run directory, it has a lease, a control folder and logs."""

    @property
    def index(self) -> int:
        return int(self.path.name)

    @property
    def sweep(self) -> SweepDir:
        return SweepDir(self.path.parent.parent)

    @property
    def run_id(self) -> str:
        return f"{self.path.parent.parent.name}_w{self.path.name}"

    @property
    def spec(self) -> Path:
        return self.sweep.spec

    @property
    def script(self) -> Path:
        return self.sweep.script

    @property
    def node_program(self) -> Path:
        return self.sweep.node_program

    @property
    def account(self) -> Path:
        """This worker's allocations, one line per event (``records.WorkerStart`` …); written by the worker."""
        return self.path / "worker.jsonl"

    @property
    def job_status(self) -> Path:
        """The worker's job as last reported by the scheduler, for the supervisors of its trials."""
        return self.path / "job.json"

    @property
    def host_log(self) -> Path:
        """Log of the sweep worker, and the output of its tuner."""
        return self.path / "host.log"

    def prepare(self) -> None:
        """Create missing folders."""
        for folder in (self.path, self.control):
            make_folder(folder, within=self.sweep.path)
        same_sharing(self.control, like=self.sweep.control)
