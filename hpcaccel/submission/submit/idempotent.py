"""Idempotent submission under a key: one run per key, however often the command is repeated and wherever a try failed.

A try records the path of the run directory before it creates that directory. The next try checks what the earlier try
left: a run with a job is returned; a job that was submitted but not recorded is looked up (``jobs.recovery``);
otherwise the remains of the try are removed and the run is submitted again. A lock per key serializes the tries.

If the command comes from another machine, that machine creates the key. A command on this machine gets a key from
``command_key``, which is kept until the command has finished. If a command is repeated within an hour after it was
killed, it continues; if it is repeated after it finished, it submits another run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from hpcaccel.core.durable_files import fsync_directory, read_json, write_json
from hpcaccel.core.progress_notes import show_note
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import ClusterError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs.critical_section import UNLOCKED, give_back, remove_old_files, take, warn_no_state
from hpcaccel.submission.jobs.job_submission import is_open, temporary
from hpcaccel.submission.jobs.recovery import recover
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.checkpoints import unpin_origin
from hpcaccel.submission.runs.status import status
from hpcaccel.submission.submit.comparison import command_key, key_file

__all__ = ["Always", "Once", "note_earlier_run", "once_or_always", "submit_once"]

KEPT_SECONDS = 30 * 86_400.0
"""Time for which the run of a key is recorded."""

_KEY = re.compile(r"[0-9A-Za-z_-]{8,64}")

T = TypeVar("T")


def once_or_always(key: str | None) -> Once | Always:
    """The submission under ``key``; without a key, every submission makes a new run."""
    return Always() if key is None else Once(key)


def submit_once(
    once: Once | Always | None,
    *,
    command: Callable[[], Mapping[str, Any]],
    slurm: Slurm | None,
    submit: Callable[[Once | Always], T],
    reopen: Callable[[Path], T],
) -> T:
    """Submit under the key of ``once``, or under a key made from the command.

    Args:
        once: the key. If None, the command's own key is used: if the same command was killed before it finished, its
            run is reopened.
        command: returns the contents that identify the command; called if ``once`` is None.
        submit: creates and submits the run.
        reopen: opens the run of an earlier try.
    """
    if once is not None:
        return submit(once)
    with command_key(command()) as pending, Once(pending.key, slurm=slurm, retry_failed=True) as own:
        try:
            if (earlier := own.earlier()) is None:
                return submit(own)
        finally:
            own.forget(unless_open=True)
    note_earlier_run(earlier.name)
    return reopen(earlier)


def note_earlier_run(run_id: str) -> None:
    """Show a note that nothing new was submitted: the same command was interrupted before it reported this run."""
    show_note(
        f"{run_id} was already submitted by the same command, which was then interrupted. "
        "To submit a new run, repeat the command"
    )


class Always:
    """A submission without a key, which always makes a new run."""

    slurm: Slurm | None = None

    def __enter__(self) -> Always:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, run: RunDir) -> None:
        pass

    def earlier(self) -> Path | None:
        return None


class Once:
    """The submission under ``key``, as a context manager; other processes with the same key wait.

    Args:
        retry_failed: whether to submit again if the run of an earlier try has ended without completing.

    Raises:
        UserError: the key is malformed.
    """

    def __init__(self, key: str, *, slurm: Slurm | None = None, retry_failed: bool = False) -> None:
        if not _KEY.fullmatch(key):
            raise UserError(f"--key {key!r} is malformed: a key consists of 8 to 64 letters, digits, '-' and '_'")
        self.slurm = slurm
        self._file = key_file(key)
        self._retry_failed = retry_failed
        self._lock_file = self._file.with_suffix(".lock")
        self._lock = UNLOCKED

    def __enter__(self) -> Once:
        remove_old_files(self._file.parent, older_than_seconds=KEPT_SECONDS)
        self._lock = take(self._lock_file, what="is submitting the same run")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorded = self._recorded() if kind is not None else None
        if recorded is not None and not recorded.path.exists():
            self._file.unlink(missing_ok=True)  # the try failed and left nothing: the next try starts over
        give_back(self._lock_file, self._lock, remove=not self._file.exists())

    def _recorded(self) -> RunDir | None:
        """The run whose creation an earlier try, or this one, has started."""
        value = read_json(self._file)
        if value is None:
            return None
        return SweepDir(value["run"]) if value["sweep"] else RunDir(value["run"])

    def forget(self, *, unless_open: bool = False) -> None:
        """Delete the record of the key's run.

        Args:
            unless_open: keep the record while the outcome of the submission is unknown.
        """
        run = self._recorded()
        if run is not None and not (unless_open and is_open(run)):
            self._file.unlink()

    def begin(self, run: RunDir) -> None:
        """Record the directory of the run before it is created.

        Raises:
            OSError: the directory cannot be recorded. With ``retry_failed``, there is only a warning.
        """
        try:
            write_json(self._file, {"run": str(run.path), "sweep": isinstance(run, SweepDir)})
        except OSError as error:
            if not self._retry_failed:
                raise
            warn_no_state(error, self._file.parent)

    def earlier(self) -> Path | None:
        """The run that an earlier try has submitted, or None. Remains of a try without a job are removed.

        Raises:
            ClusterError, SlurmCommandError: the queue cannot be read, so that the outcome is unknown.
            ClusterError: the earlier try's job has left the queue without an attempt.
        """
        run = self._recorded()
        if run is None:
            return None
        if run.record.exists():
            recover(run, slurm=self.slurm)
            if read_record(run).job_ids:
                return None if self._has_failed(run) else run.path
            _refuse_started(run)
            _unpin_origin(run, run_id=run.run_id)
            shutil.rmtree(run.path)
            fsync_directory(run.path.parent)
        _unpin_origin(temporary(run), run_id=run.run_id)
        shutil.rmtree(temporary(run).path, ignore_errors=True)
        self._file.unlink()
        return None

    def _has_failed(self, run: RunDir) -> bool:
        if not self._retry_failed:
            return False
        now = status(run, self.slurm)
        if now.ended and now.state != "completed":
            self._file.unlink()
            return True
        return False


def _unpin_origin(place: RunDir, *, run_id: str) -> None:
    """Unpin the checkpoint from which the run in ``place`` was to start, before ``place`` is removed."""
    if place.record.exists():
        with suppress(OSError):
            unpin_origin(read_record(place).branched_from, run_id=run_id)


def _refuse_started(run: RunDir) -> None:
    """Raises ClusterError if a job of the run has started, according to its log, although the queue shows none."""
    record = read_record(run)
    parts = [run, *(run.task(index) for index in range(record.array_size or 0))]
    log = next((part.slurm_log for part in parts if part.slurm_log.exists()), None)
    if record.backend == "slurm" and log is not None:
        raise ClusterError(
            f"an earlier execution of this command submitted {run.path}, but its job left the queue before its first "
            f"attempt. See {log}. To submit again, delete that run directory first"
        )
