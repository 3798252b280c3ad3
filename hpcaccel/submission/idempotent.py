"""One submission for one key, however often it is asked for, and wherever an earlier try ended.

A try writes down which run directory it makes before it makes it. The next one finds out what became of that: a run
with its job is the answer; a job that was handed in but not written down is looked for by its script; anything less is
removed, and the submission made anew. A lock per key makes tries wait for each other; ``idempotent_resume`` has one per
run, which sbatch holds as well.

Where the user's command came from another machine, that machine makes the key. A command given here gets one from
``pending``: it lasts until the command has come to its end, so that the same command, given again after it was killed,
goes on with it, and given again after it was done submits another run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcaccel.core.progress_notes import tell
from hpcaccel.core.run_dir import RunDir, SweepDir, fsync_directory, read_json, state_home, write_json
from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.build import temporary
from hpcaccel.submission.checkpoints import let_go
from hpcaccel.submission.idempotent_resume import is_open
from hpcaccel.submission.locks import forget_old, give_back, take, tell_of_no_state
from hpcaccel.submission.pending import Pending, pending
from hpcaccel.submission.recovery import recover
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.status import status

__all__ = ["Always", "Once", "asked_for", "key_file", "once_asked_for", "once_or_always", "tell_of_earlier"]


def once_or_always(key: str | None) -> Once | Always:
    """Without a key every submission is one of its own."""
    return Always() if key is None else Once(key)


WINDOW_SECONDS = 3600.0
"""After so long a command that was killed is not gone on with: what is given then is meant as a new one."""

KEPT_SECONDS = 30 * 86_400.0
"""For so long it is known which run was submitted under a key."""

_KEY = re.compile(r"[0-9A-Za-z_-]{8,64}")


def key_file(key: str) -> Path:
    """Where it is written down which run was submitted under a key."""
    return state_home() / "hpcaccel" / "keys" / f"{key}.json"


@contextmanager
def asked_for(command: Mapping[str, Any]) -> Iterator[Pending]:
    """A key for a command that submits; done when the block is, or failed and left nothing that is open.

    Args:
        command: what makes it the same as another.
    """
    with pending("submissions", command, kept_seconds=WINDOW_SECONDS) as asked:
        try:
            yield asked
            asked.done = True
        except BaseException as error:
            # A Slurm that did not answer may have taken the job; what an earlier try left open stays this command's.
            is_silent = isinstance(error, SlurmCommandError) and not isinstance(error, SlurmUnreachable)
            asked.done = not is_silent and not _has_open_runs(asked.key)
            raise


def _has_open_runs(key: str) -> bool:
    """Whether it is not known yet what became of a submission under the key, or under a part of it."""
    said = [read_json(file) for file in key_file(key).parent.glob(f"{key}*.json")]
    return any(is_open(RunDir(one["run"])) for one in said if one is not None)


@contextmanager
def once_asked_for(command: Mapping[str, Any], *, slurm: Slurm | None = None) -> Iterator[Once]:
    """The same of a command that submits one run or one sweep."""
    with asked_for(command) as asked, Once(asked.key, slurm=slurm, only_unless_given_up=True) as once:
        try:
            yield once
        finally:
            once.forget(unless_open=True)


def tell_of_earlier(run_id: str) -> None:
    """Tell that nothing was submitted now: the same, asked for before, was cut off before it could say so."""
    tell(f"{run_id} was already submitted by the same command, which was cut off. Submit again for a new run")


class Always:
    """A submission without a key."""

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
    """The submission with ``key``, for the length of a ``with`` block; another process with the key waits meanwhile.

    Args:
        only_unless_given_up: an earlier try that was cancelled meanwhile, or failed, does not count.

    Raises:
        UserError: the key is none.
    """

    def __init__(
        self,
        key: str,
        *,
        slurm: Slurm | None = None,
        only_unless_given_up: bool = False,
    ) -> None:
        if not _KEY.fullmatch(key):
            raise UserError(f"--key {key!r} is no key: 8 to 64 letters, digits, - and _")
        self._file = key_file(key)
        self._slurm = slurm
        self._only_unless_given_up = only_unless_given_up
        self._lock_file = self._file.with_suffix(".lock")
        self._lock = -1

    def __enter__(self) -> Once:
        forget_old(self._file.parent, older_than_seconds=KEPT_SECONDS)
        self._lock = take(self._lock_file, what="submits the same")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self._is_without_a_run():
            self._file.unlink(missing_ok=True)  # it failed and left nothing behind: the next try starts afresh
        give_back(self._lock_file, self._lock, remove=not self._file.exists())

    @property
    def slurm(self) -> Slurm | None:
        return self._slurm

    def forget(self, *, unless_open: bool = False) -> None:
        """Args:
        unless_open: keep it where it is not known yet what became of the submission.
        """
        said = read_json(self._file)
        if said is not None and not (unless_open and is_open(RunDir(said["run"]))):
            self._file.unlink()

    def begin(self, run: RunDir) -> None:
        """Write down where the run is going to be, before anything is made.

        Raises:
            OSError: that cannot be written, and whoever has made the key counts on it. A command given here does not.
        """
        try:
            write_json(self._file, {"run": str(run.path), "sweep": isinstance(run, SweepDir)})
        except OSError as error:
            if not self._only_unless_given_up:
                raise
            tell_of_no_state(error, self._file.parent)

    def earlier(self) -> Path | None:
        """The run that an earlier try has submitted; None: there is none, and nothing is left of it.

        Raises:
            ClusterError, SlurmCommandError: the queue does not answer, so that nobody can tell.
        """
        said = read_json(self._file)
        if said is None:
            return None
        run = SweepDir(said["run"]) if said["sweep"] else RunDir(said["run"])
        if run.record.exists():
            recover(run, slurm=self._slurm)
            if read_record(run).job_ids:
                return None if self._is_given_up(run) else run.path
            _refuse_one_that_is_over(run)
            _let_go(run, of=run)
            shutil.rmtree(run.path)
            fsync_directory(run.path.parent)
        _let_go(temporary(run), of=run)
        shutil.rmtree(temporary(run).path, ignore_errors=True)
        self._file.unlink()
        return None

    def _is_given_up(self, run: RunDir) -> bool:
        if not self._only_unless_given_up:
            return False
        now = status(run, self._slurm)
        if now.ended and now.state != "completed":
            self._file.unlink()
            return True
        return False

    def _is_without_a_run(self) -> bool:
        """Whether nothing is there of the run that was begun."""
        said = read_json(self._file)
        return said is not None and not Path(said["run"]).exists()


def _let_go(place: RunDir, *, of: RunDir) -> None:
    """What is about to be removed needs no checkpoint any more."""
    if place.record.exists():
        with suppress(OSError):
            let_go(read_record(place).branched_from, run_id=of.run_id)


def _refuse_one_that_is_over(run: RunDir) -> None:
    """Raises ClusterError where a job has begun and has been forgotten by the queue."""
    record = read_record(run)
    parts = [run, *(run.task(index) for index in range(record.array_size or 0))]
    log = next((part.slurm_log for part in parts if part.slurm_log.exists()), None)
    if record.backend == "slurm" and log is not None:
        raise ClusterError(
            f"an earlier try has submitted {run.path}, and its job has left the queue before its first attempt: look "
            f"into {log}"
        )
