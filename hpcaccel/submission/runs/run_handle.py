"""Handle to a submitted run: status, wait, result, stop, save, resume."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunFailed, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.calls import call_failure
from hpcaccel.submission.jobs.run_state import read_facts, read_record, read_worker_facts
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.status import RunStatus, status

if TYPE_CHECKING:
    from submitit import Job

__all__ = ["AnyRun", "Run", "RunArray", "SweepRun", "open_run"]

QUERY_SECONDS = {"slurm": 30.0, "local": 1.0}
"""Interval at which ``wait`` reads the scheduler's state, which is cached for longer (``slurm.queue_cache``). The run
directory, where most ends appear first, is read more often."""
LOOK_SECONDS = 1.0
RESULT_SECONDS = 15.0
"""Time for which ``result`` waits for the result file of a completed run."""
_DONE = ("completed", "pruned")
CONFIRM_SECONDS = 10.0
"""A run that seems lost is checked again after this time, because file systems and queues may lag."""


class _Handle:
    """The common part of runs, arrays and sweeps."""

    def __init__(self, path: str | os.PathLike[str], *, slurm: Slurm | None = None, is_known: bool = False) -> None:
        self.dir = RunDir(path)
        self._slurm = slurm
        if not is_known:
            self.record  # noqa: B018 - raises now, not later, if this is not a run directory

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self.dir.path

    @property
    def run_id(self) -> str:
        return self.dir.run_id

    @property
    def record(self) -> RunRecord:
        return read_record(self.dir)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def job_id(self) -> str:
        """Id of the newest job of the run; "" if there is none."""
        job_ids = self.record.job_ids
        return job_ids[-1] if job_ids else ""

    def status(self, *, patient: bool = False) -> RunStatus:
        """The current status. The scheduler is queried rarely, and only if the run directory is not enough.

        Args:
            patient: for repeated calls; see :func:`hpcaccel.submission.runs.status.statuses`.
        """
        return status(self.dir, self._slurm, patient=patient)

    def wait(self, timeout: float | None = None, *, timeout_seconds: float | None = None) -> RunStatus:
        """Wait until the run has ended or is paused.

        Args:
            timeout: in seconds, as in ``concurrent.futures``; ``timeout_seconds`` is the same.

        Raises:
            TimeoutError: the run has not ended within ``timeout``; it continues.
        """
        timeout_seconds = timeout if timeout_seconds is None else timeout_seconds
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        query_seconds = QUERY_SECONDS[self.record.backend]
        queried = float("-inf")
        looked_lost: float | None = None
        while True:
            now = time.monotonic()
            if self._settled() or now - queried >= query_seconds or looked_lost is not None:
                current, queried = self.status(patient=queried > 0), now
                if current.ended and (current.state != "lost" or looked_lost is not None):
                    return current
                looked_lost = now if current.ended else None
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"run {self.run_id} has not ended within {timeout_seconds:g} s; it continues")
            pause = CONFIRM_SECONDS if looked_lost is not None else self._look_seconds
            time.sleep(pause if deadline is None else max(0.0, min(pause, deadline - now)))

    def _settled(self) -> bool:
        return read_facts(self.dir).settled is not None

    def _outcome(self) -> Any:
        """The value of this handle's future."""
        return self.wait()

    def as_future(self) -> Future[Any]:
        """A future for ``concurrent.futures.wait``. Its value is the result, an array's results, or a sweep's status.

        A thread of this process waits. Cancelling the future does not affect the run: use :meth:`cancel`.
        """
        future: Future[Any] = Future()

        def wait() -> None:
            with contextlib.suppress(InvalidStateError):  # the future was cancelled
                try:
                    future.set_result(self._outcome())
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=wait, name=f"hpcaccel-{self.run_id}", daemon=True).start()
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        """``await run`` returns the result of :meth:`as_future`."""
        return asyncio.wrap_future(self.as_future()).__await__()

    @property
    def _look_seconds(self) -> float:
        return LOOK_SECONDS

    def stop(self, then: control.Then = "pause") -> None:
        """Stop the run after a save; see :func:`hpcaccel.submission.runs.control.request_stop`."""
        control.request_stop(self.dir, then=then, slurm=self._slurm)

    def save(self) -> None:
        """Save a checkpoint now and continue; see :func:`hpcaccel.submission.runs.control.request_save`."""
        control.request_save(self.dir, slurm=self._slurm)

    def cancel(self) -> None:
        """Cancel the run now, without a requeue; see :func:`hpcaccel.submission.runs.control.request_cancel`."""
        control.request_cancel(self.dir, slurm=self._slurm)

    def resume(self) -> None:
        """Continue the run in a new job; see :func:`hpcaccel.submission.runs.control.resume`."""
        control.resume(self.dir, slurm=self._slurm)


class Run(_Handle):
    """A single run, in one job or several. Raises RunDirectoryError if ``path`` is not a run directory."""

    @property
    def job(self) -> Job[Any]:
        """submitit's job object for the newest job."""
        from hpcaccel.submission.runs.submitit_job import RunJob

        return RunJob(folder=self.dir.submitit, job_id=self.job_id, tasks=list(range(self.ranks)))

    @property
    def ranks(self) -> int:
        return read_launch(self.dir).ranks

    def log(self, rank: int = 0, *, attempt: int | None = None) -> Path:
        """The log file of a rank in ``attempt``, by default the newest attempt."""
        return self.dir.rank_log(attempt or max(1, read_facts(self.dir).attempts), rank)

    def result(self, timeout: float | None = None, *, timeout_seconds: float | None = None) -> Any:
        """Wait, then return the value that the function returned on rank 0; None for scripts and commands.

        Args:
            timeout: in seconds, as in ``concurrent.futures``; ``timeout_seconds`` is the same.

        Raises:
            RunFailed: the run did not complete or has no result. The error has the function's traceback, if any.
            TimeoutError: the run has not ended within ``timeout``.
        """
        ended = self.wait(timeout, timeout_seconds=timeout_seconds)
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
        return self.result()

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


class RunArray(_Handle):
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

    def results(self, timeout: float | None = None, *, timeout_seconds: float | None = None) -> list[Any]:
        """Wait for all tasks and return what rank 0 of each returned. Raises the errors of ``Run.result``."""
        self.wait(timeout, timeout_seconds=timeout_seconds)
        return [run.result() for run in self.runs]

    def _outcome(self) -> list[Any]:
        return self.results()

    @property
    def _look_seconds(self) -> float:
        return max(LOOK_SECONDS, len(self) / 100)  # each check reads a file per task

    def _settled(self) -> bool:
        return all(read_facts(self.dir.task(index)).settled is not None for index in range(len(self)))


class SweepRun(_Handle):
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
        return max(LOOK_SECONDS, (self.record.array_size or 0) / 100)

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
