"""Base class of handles to runs, arrays and sweeps: status, waiting, progress, stop, resume."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.notebook import notebook_shell
from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs.run_state import read_facts, read_record
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.status import RunStatus, status

if TYPE_CHECKING:
    from hpcaccel.submission.runs.watch import Watcher

__all__ = ["CONFIRM_SECONDS", "LOOK_SECONDS", "QUERY_SECONDS", "Handle"]

QUERY_SECONDS = {"slurm": 30.0, "local": 1.0}
"""Interval at which ``wait`` reads the scheduler's state, which is cached for longer (``slurm.queue_cache``). The run
directory, where most ends appear first, is read more often."""
LOOK_SECONDS = 1.0
CONFIRM_SECONDS = 10.0
"""A run that seems lost is checked again after this time, because file systems and queues may lag."""


class Handle:
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
        """The run directory."""
        return self.dir.path

    @property
    def run_id(self) -> str:
        """The id, such as ``20261120-153012-4f2a``."""
        return self.dir.run_id

    @property
    def record(self) -> RunRecord:
        """The record of the submission: job ids, versions, git commit. Read from disk each time."""
        return read_record(self.dir)

    @property
    def name(self) -> str:
        """The name in the spec."""
        return self.record.name

    @property
    def job_id(self) -> str:
        """Id of the newest job of the run; "" if there is none."""
        job_ids = self.record.job_ids
        return job_ids[-1] if job_ids else ""

    def status(self, *, patient: bool = False) -> RunStatus:
        """The current status. The scheduler is queried rarely, and only if the run directory is not enough.

        Args:
            patient: for repeated calls: use cached job states until they expire, even if a job has changed.

        Returns:
            A ``RunStatus``. Its ``state`` is one of pending, starting, running, stopping and requeued for an active
            run, and one of completed, pruned, failed, cancelled, paused and lost for one that has ended.
        """
        return status(self.dir, self._slurm, patient=patient)

    def wait(
        self, timeout: float | None = None, *, timeout_seconds: float | None = None, progress: bool | None = None
    ) -> RunStatus:
        """Wait until the run has ended or is paused.

        Args:
            timeout: in seconds, as in ``concurrent.futures``; ``timeout_seconds`` is the same.
            progress: whether to show the progress meanwhile: state, step, newest values, time left. It is shown in the
                notebook's cell, or on stderr. Default: only in a notebook.

        Returns:
            The status at the end. A run that has failed raises no error here: look at ``state``.

        Raises:
            TimeoutError: the run has not ended within ``timeout``; it continues.
        """
        timeout_seconds = timeout if timeout_seconds is None else timeout_seconds
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if notebook_shell() is not None if progress is None else progress:
            return self._follow(deadline)
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

    def _follow(self, deadline: float | None) -> RunStatus:
        """Wait with a display of the progress. ``deadline`` is in monotonic seconds."""
        from hpcaccel.submission.runs.progress_display import display, follow

        with display() as shown:
            return follow(self._watcher(), shown, deadline=deadline).status

    def _watcher(self) -> Watcher:
        from hpcaccel.submission.runs.watch import BackgroundQuery, Watcher

        return Watcher(self.dir, BackgroundQuery.about(self.dir, self._slurm))

    def _repr_html_(self) -> str:
        """The run's state and newest values, as a notebook shows them."""
        from hpcaccel.submission.runs.notebook_display import run_html

        job = f"job {self.job_id} · " if self.job_id else ""
        return run_html(self._watcher().look(), lines=[f"{job}{self.path}"])

    def _settled(self) -> bool:
        return read_facts(self.dir).settled is not None

    def _outcome(self) -> Any:
        """The value of this handle's future, which a thread waits for: without a display."""
        return self.wait(progress=False)

    def as_future(self) -> Future[Any]:
        """A future for ``concurrent.futures.wait``. Its value is the result, an array's results, or a sweep's status.

        A thread of this process waits. Cancelling the future does not affect the run: use :meth:`cancel`.

        Returns:
            The future. Its exception is that of ``result``, such as ``RunFailed``.

        Example::

            from concurrent.futures import as_completed

            runs = [hpcaccel.submit("job.yaml", cluster="local") for _ in range(2)]
            for future in as_completed([run.as_future() for run in runs]):
                future.result()
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
        """Request that the run save and stop, and return before it has stopped.

        Args:
            then: ``pause``: the run stays stopped until :meth:`resume`; ``requeue``: it returns to the queue;
                ``finish``: the code after the training loop runs, and the run ends.

        Raises:
            UserError: the run has ended; it is in the queue, and ``then`` is not ``pause``; its program is stopped by
                signals, and ``then`` is ``finish``.
            RunDirectoryError: the request cannot be written.
            ClusterError, SlurmCommandError: Slurm refused to cancel a pending job, or did not respond. The request is
                saved and takes effect when a job of the run is running.
        """
        control.request_stop(self.dir, then=then, slurm=self._slurm)

    def save(self) -> None:
        """Request that a running training save a checkpoint, all ranks after the same step, and continue.

        Raises:
            UserError: no training of the run is running, or its program is stopped by signals and decides itself
                when to save.
            RunDirectoryError: the request cannot be written.
        """
        control.request_save(self.dir, slurm=self._slurm)

    def profile(self, *, steps: int = 5, ranks: Sequence[int] = (0,)) -> str:
        """Request that ranks of a running training record their next steps with torch's profiler, and continue.

        The traces are written to the run directory; ``hpcaccel profile`` also waits for them.

        Args:
            steps: number of optimizer steps, 1 to 50.
            ranks: the ranks that record, at most 16.

        Returns:
            The request's id.

        Raises:
            UserError: no training is running, ``steps`` or ``ranks`` are out of range, the program does not use
                hpcaccel's runtime, or another request is open.
            RunDirectoryError: the request cannot be written.
        """
        from hpcaccel.submission.runs.profiling import request_profile

        return request_profile(self.dir, steps=steps, ranks=ranks, slurm=self._slurm).id

    def cancel(self) -> None:
        """Cancel the run now, without a requeue. :meth:`resume` continues it from its newest checkpoint.

        Raises:
            UserError: the run has ended, and none of its jobs is left in the queue.
            RunDirectoryError: the request cannot be written.
            ClusterError, SlurmCommandError: Slurm refused to cancel a job, or did not respond. If the run has not
                ended, the request is saved and takes effect when a job of the run is running.
        """
        control.request_cancel(self.dir, slurm=self._slurm)

    def resume(self) -> None:
        """Continue a run that is paused, failed, cancelled or lost in a new job; for an array, all such tasks.

        The new job starts from the newest checkpoint.

        Raises:
            RunBusy: the run has not ended, or will be requeued.
            UserError: the run is completed, or one of its secrets is not set in this environment.
            ClusterError: this machine has no Slurm, or Slurm refused the job.
            SlurmCommandError: Slurm did not respond.
        """
        control.resume(self.dir, slurm=self._slurm)
