"""One submission for one key, however often it is asked for, and wherever an earlier try ended.

A try writes down which run directory it makes before it makes it. The next one finds out what became of that: a run
with its job is the answer; a job that was handed in but not written down is looked for by its script; anything less is
removed, and the submission made anew. A lock per key lets tries wait for each other, sbatch included: a try that was
killed counts as ended only when its sbatch has ended, too.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from hpcaccel.errors import ClusterError, UserError
from hpcaccel.rundir import (
    RunDir,
    SweepDir,
    fsync_directory,
    read_json,
    read_lines,
    register,
    state_home,
    write_json,
)
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.build import temporary
from hpcaccel.submission.facts import read_record, write_record
from hpcaccel.submission.locks import slurm_holding, take

__all__ = ["Once", "key_file", "once_or_always"]


def once_or_always(key: str | None) -> Once | Always:
    """Without a key every submission is one of its own."""
    return Always() if key is None else Once(key)


SETTLING_SECONDS = 15.0
"""How long the controller may take to show a job that somebody was handing in when he was killed."""

_KEY = re.compile(r"[0-9A-Za-z_-]{8,64}")


def key_file(key: str) -> Path:
    """Where it is written down which run was submitted under a key."""
    return state_home() / "hpcaccel" / "keys" / f"{key}.json"


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

    Raises:
        UserError: the key is none.
    """

    def __init__(
        self,
        key: str,
        *,
        slurm: Slurm | None = None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _KEY.fullmatch(key):
            raise UserError(f"--key {key!r} is no key: 8 to 64 letters, digits, - and _")
        self._file = key_file(key)
        self._slurm = slurm
        self._now = now
        self._sleep = sleep
        self._lock = -1

    def __enter__(self) -> Once:
        self._lock = take(self._file.with_suffix(".lock"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self._said() is None:
            self._file.unlink(missing_ok=True)  # it failed and left nothing behind: the next try starts afresh
        os.close(self._lock)

    @property
    def slurm(self) -> Slurm:
        """Slurm, whose commands hold the lock as long as they run."""
        return self._slurm or slurm_holding(self._lock)

    def begin(self, run: RunDir) -> None:
        """Write down where the run is going to be, before anything is made."""
        write_json(self._file, {"run": str(run.path), "sweep": isinstance(run, SweepDir), "began": self._now()})

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
            if read_record(run).job_ids:
                return run.path
            if (job_ids := self._handed_in(run, began=float(said["began"]))) and self._adopt(run, job_ids):
                return run.path
            shutil.rmtree(run.path)
            fsync_directory(run.path.parent)
        shutil.rmtree(temporary(run).path, ignore_errors=True)
        self._file.unlink()
        return None

    def _said(self) -> Path | None:
        """The run that was begun, as far as anything of it is there."""
        said = read_json(self._file)
        return Path(said["run"]) if said is not None and Path(said["run"]).exists() else None

    def _handed_in(self, run: RunDir, *, began: float) -> list[str]:
        """Jobs of the run's script, oldest first, that nobody has written down."""
        if (process := read_json(run.local_process)) is not None:
            return [str(process["job_id"])]
        if read_record(run).backend == "local" or not run.script.exists():
            return []
        while True:
            if found := self.slurm.jobs_of_script(run.script) or _started(run):
                return found
            if self._now() - began > SETTLING_SECONDS:
                return []
            self._sleep(1.0)

    def _adopt(self, run: RunDir, job_ids: list[str]) -> bool:
        """Write down what an earlier try could not; False: too much is missing, and its jobs are taken back."""
        record = read_record(run)
        if isinstance(run, SweepDir) or (record.array_size is not None and len(job_ids) > 1):
            for job_id in job_ids:
                self.slurm.cancel(job_id)
            return False
        if record.array_size is not None:
            for index in range(record.array_size):
                task = run.task(index)
                write_record(task, replace(read_record(task), job_ids=[f"{job_ids[0]}_{index}"]), sync=False)
        links = job_ids if len(job_ids) > 1 else []
        write_record(run, replace(record, job_ids=job_ids[:1], links=links))
        register(run, name=record.name, job_id=job_ids[0])
        return True


def _started(run: RunDir) -> list[str]:
    """The job that has begun the run's ledger: it may be over and forgotten by the queue."""
    for line, _ in read_lines(run.ledger):
        if job_id := line.get("job_id"):
            return [str(job_id)]
    if run.slurm_log.exists() and not run.ledger.exists():
        raise ClusterError(
            f"an earlier try has submitted {run.path}, and its job has left the queue before its first attempt: look "
            f"into {run.slurm_log}"
        )
    return []
