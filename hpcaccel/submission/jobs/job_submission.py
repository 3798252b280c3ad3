"""Submitting the job of a run: write the intent, submit the script, record the job. Used by submit, resume and sweeps.

A lock per run serializes the processes that submit the run. sbatch inherits the lock, so that a killed submit counts as
ended only when its sbatch has ended, too. Before a script is submitted, an intent is written to the run directory. The
intent is removed once the job is in the run's record. If an intent exists while no process holds the lock, a submit or
resume was killed, or Slurm did not confirm its job; ``recovery`` checks whether the job exists.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.run_dir import RUN_ID, RunDir, state_home
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs.backend import Backend, SlurmBackend
from hpcaccel.submission.jobs.critical_section import UNLOCKED, defer_signals, give_back, take, take_if_free
from hpcaccel.submission.jobs.run_state import ledger_sizes, read_record, record_job

__all__ = [
    "Intent",
    "JobSubmission",
    "SubmitUnderway",
    "is_open",
    "is_open_for",
    "made_in",
    "may_have_job",
    "plain_job_id",
    "tasks_of",
    "temporary",
]


R = TypeVar("R", bound=RunDir)


class SubmitUnderway(Exception):
    """Another process is submitting the run, or its job may yet appear in the queue. Raised with ``wait=False``."""


def is_open(run: RunDir) -> bool:
    """Whether the run has an unfinished submit or resume."""
    return run.submitting.exists() or run.resuming.exists()


def is_open_for(run: RunDir, part: RunDir) -> bool:
    """Whether an unfinished submit or resume is for ``part``: the run itself, or one of its tasks or workers."""
    intent = read_json(run.submitting) or read_json(run.resuming) or {}
    indices = intent.get("indices")
    return indices is None or part.path == run.path or int(part.path.name) in indices


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The plan of an unfinished submit or resume, as written to the run directory."""

    began: float
    """Time at which the intent was written, in seconds since 1970."""
    known: frozenset[str]
    """Ids of the run's earlier jobs, without task indices."""
    indices: list[int] | None
    """The tasks or workers to submit; None for a single job."""
    offsets: list[int]
    """The size in bytes of the run's ledger, or of each task's ledger or worker's account, before the submission."""


class JobSubmission:
    """Submission of a run's job, as a context manager that holds the run's lock; other submissions of the run wait.

    Args:
        run: the run, the sweep or the parent folder of an array.
        slurm: the Slurm commands to use; by default ``Slurm()``.
        wait: whether to wait for another process that submits the run; if False, raise ``SubmitUnderway``.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        slurm: Slurm | None = None,
        wait: bool = True,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self.waits = wait
        self.now, self.sleep = now, sleep
        self._given = slurm
        # One lock per run, independent of symbolic links in the run's path.
        name = hashlib.sha256(os.path.realpath(self.run.path).encode()).hexdigest()[:32]
        self._path = state_home() / "hpcaccel" / "resumes" / f"{name}.lock"
        self._lock = UNLOCKED
        self._intent: Intent | None = None

    def __enter__(self) -> JobSubmission:
        what = f"is submitting {self.run.run_id} or checking whether it has a job"
        lock = take(self._path, what=what) if self.waits else take_if_free(self._path)
        if lock is None:
            raise SubmitUnderway
        self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._intent is not None and not may_have_job(error):
            self.clear_intent()
        give_back(self._path, self._lock, remove=True)

    @property
    def is_locked(self) -> bool:
        """Whether this process has the lock. False if locks are not available."""
        return self._lock != UNLOCKED

    @property
    def slurm(self) -> Slurm:
        """Slurm's commands. They inherit the lock and hold it while they run, even if this process is killed."""
        slurm = self._given or Slurm()
        return slurm.holding(self._lock) if self.is_locked else slurm

    def holding(self, backend: Backend) -> Backend:
        """``backend``, changed so that its Slurm commands inherit the lock."""
        if not isinstance(backend, SlurmBackend) or not self.is_locked:
            return backend
        same = copy.copy(backend)
        same.slurm = backend.slurm.holding(self._lock)
        return same

    # -- the intent ---------------------------------------------------------------------------------------------------

    def write_intent(self, *, indices: Sequence[int] | None = None, place: RunDir | None = None) -> None:
        """Write the intent, before the script is submitted.

        Args:
            indices: the tasks of an array, or the workers of a sweep, that are submitted.
            place: the temporary directory of a new run, to which the intent is then written.
        """
        parts = [self.run] if indices is None else [self.run.task(index) for index in indices]
        self._intent = Intent(
            began=self.now(),
            known=frozenset(_jobs(self.run)),
            indices=None if indices is None else list(indices),
            offsets=ledger_sizes(parts),
        )
        note = {**vars(self._intent), "known": sorted(self._intent.known)}
        write_json((place or self.run).submitting, note)

    def clear_intent(self) -> None:
        self.run.submitting.unlink(missing_ok=True)
        self.run.resuming.unlink(missing_ok=True)

    def interrupted(self) -> Intent | None:
        """The intent that an earlier submission left, or None."""
        value = read_json(self.run.submitting) or read_json(self.run.resuming)
        return None if value is None else Intent(**{**value, "known": frozenset(value["known"])})

    def is_recorded(self, earlier: Intent) -> bool:
        """Whether the job of an interrupted submission is in the record."""
        return bool({plain_job_id(job_id) for job_id in read_record(self.run).job_ids} - earlier.known)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        backend: Backend,
        *,
        text: str | None = None,
        first_job_backend: Backend | None = None,
        record: Callable[[str], None] | None = None,
        again: str = "Running the same command again",
    ) -> str:
        """Submit the script through submitit, record the job and clear the intent. If a step fails, cancel the job.

        Call ``write_intent`` first. SIGINT, SIGTERM and SIGHUP are deferred until the job is recorded.

        Args:
            backend: Slurm or this machine.
            text: the text of the script; None for the script in the run directory.
            first_job_backend: a backend with options that the followers of a chain do not have, such as dependencies.
            record: called with the job id to record all jobs of a sweep, which may be submitted as several arrays.
            again: names, in the error message, the command that continues if Slurm does not confirm the submission.

        Returns:
            The job id.

        Raises:
            ClusterError: Slurm refused the job.
            SlurmUnreachable: Slurm did not respond before the script was submitted: there is no job.
            SlurmCommandError: Slurm did not confirm the job and may have accepted it. The intent stays.
        """
        try:
            return self._submit(backend, text, first_job_backend or backend, record)
        except SlurmCommandError as error:
            raise _maybe_submitted(error, self.run, again=again) if may_have_job(error) else error from None

    def _submit(
        self, backend: Backend, text: str | None, first_job_backend: Backend, record: Callable[[str], None] | None
    ) -> str:
        from hpcaccel.submission.jobs.submitit_executor import RunExecutor

        assert self._intent is not None, "write_intent() comes first"
        intent, started = self._intent, list[str]()
        indices = intent.indices if record is None else None

        def start(script: Path) -> str:
            started.append(self.holding(first_job_backend).start(self.run, script, indices))
            return started[0]

        executor = RunExecutor(self.run, text=text, start=start, indices=indices)
        executor.write_calls()
        try:
            with defer_signals():
                executor.submit_tasks()
                if record is not None:
                    record(started[0])
                else:
                    followers = self.holding(backend)
                    record_job(self.run, started[0], indices=indices, offsets=intent.offsets, backend=followers)
                self.clear_intent()
        except BaseException:
            if started:
                self.holding(first_job_backend).discard(self.run, started[0])
            raise
        return started[0]


def may_have_job(error: BaseException | None) -> bool:
    """Whether a submission that failed with ``error`` may have left a job: Slurm did not respond after sbatch started.

    If so, the intent and everything that the job needs must stay. After any other failure there is no job.
    """
    return isinstance(error, SlurmCommandError) and not isinstance(error, SlurmUnreachable)


def _maybe_submitted(error: SlurmCommandError, run: RunDir, *, again: str) -> SlurmCommandError:
    message = (
        f"{error.stderr.strip() or 'no response'}\nIt is unknown whether Slurm accepted the job, so {run.run_id} is "
        f"kept. `hpcaccel status {run.run_id}` shows the job once Slurm responds. {again} continues with that job, or "
        "submits one if there is none"
    )
    return SlurmCommandError(error.command, error.returncode, message)


def _jobs(run: RunDir) -> set[str]:
    if not run.record.exists():
        return set()  # a new run whose directory is incomplete
    records = [read_record(one) for one in (run, *tasks_of(run))]
    return {plain_job_id(job_id) for record in records for job_id in (*record.job_ids, *record.links)}


def tasks_of(run: RunDir) -> list[RunDir]:
    """The tasks of an array; [] for other runs."""
    size = None if isinstance(run, SweepDir) else read_record(run).array_size
    return [run.task(index) for index in range(size or 0)]


def plain_job_id(job_id: str) -> str:
    """A job id without its task index: ``123`` of ``123_4``."""
    return job_id.partition("_")[0]


def temporary(run: R) -> R:
    """The directory in which a new run or sweep is created; it is renamed to ``run`` when complete."""
    return type(run)(run.path.with_name(f".{run.path.name}.tmp"))


def made_in(place: Path) -> RunDir | None:
    """The run whose ``temporary`` directory is ``place``; None if ``place`` is not named like a temporary directory."""
    match = re.fullmatch(rf"\.({RUN_ID})\.tmp", place.name)
    return None if match is None else RunDir(place.with_name(match[1]))
