"""One hand-in of a run at a time, and what is known of one that was cut off.

Before a run's script is handed in, for the first time or again, a note in its directory says that this is about to
happen; it is taken away once the job is in the run's record. Who finds that note while nobody holds the lock knows that
a submit or a resume was killed in between (``recovery`` then finds out what became of it). A lock for each run lets
them wait for each other, sbatch included: one that was killed counts as ended only when its sbatch has ended, too.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from hpcaccel.core.progress_notes import told_when_slow
from hpcaccel.core.run_dir import RunDir, SweepDir, WorkerDir, read_json, read_lines, state_home, write_json
from hpcaccel.errors import SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission import local
from hpcaccel.submission.backend import Backend, SlurmBackend
from hpcaccel.submission.locks import UNLOCKED, give_back, take, take_if_free
from hpcaccel.submission.recording import ledger_sizes
from hpcaccel.submission.run_state import read_record

__all__ = ["SETTLING_SECONDS", "Interrupted", "Turn", "Underway", "is_open", "is_open_for"]

SETTLING_SECONDS = 15.0
"""How long the controller may take to show a job that somebody was handing in when he was killed."""
UNLOCKED_SETTLING_SECONDS = 90.0
"""The same where there are no locks: his sbatch may still be at work."""

F = TypeVar("F", bound=Sized)


class Underway(Exception):
    """What became of a hand-in cannot be told yet; only for who does not wait."""


def is_open(run: RunDir) -> bool:
    """Whether a submit or a resume of the run has not come to its end."""
    return run.submitting.exists() or run.resuming.exists()


def is_open_for(run: RunDir, part: RunDir) -> bool:
    """Whether that hand-in is for ``part``: the run itself, or one of its tasks or workers."""
    said = read_json(run.submitting) or read_json(run.resuming) or {}
    indices = said.get("indices")
    return indices is None or part.path == run.path or int(part.path.name) in indices


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A submit or a resume that has not come to its end."""

    began: float
    known: frozenset[str]
    """The jobs, by plain id, that the run had before."""
    indices: list[int] | None
    """The tasks or workers it was for; None: the run is no array."""
    offsets: list[int]
    """Where the ledger of each task, or the account of each worker, ended."""


class Turn:
    """The one hand-in of a run that is under way, for the length of a ``with`` block; another one waits meanwhile.

    Args:
        run: the run, the sweep or the parent folder of an array.
        slurm: None: Slurm's own commands.
        wait: for another process that hands the run in; else that is ``Underway``.
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
        self._given = slurm
        self._wait = wait
        self._now, self._sleep = now, sleep
        # One lock for a run, whichever symbolic links it is named through.
        name = hashlib.sha256(os.path.realpath(self.run.path).encode()).hexdigest()[:32]
        self._path = state_home() / "hpcaccel" / "resumes" / f"{name}.lock"
        self._lock = UNLOCKED
        self._begun = False

    def __enter__(self) -> Turn:
        what = f"hands {self.run.run_id} in, or finds out what became of it"
        lock = take(self._path, what=what) if self._wait else take_if_free(self._path)
        if lock is None:
            raise Underway
        self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # It failed, and nothing was handed in; but a controller that did not answer may have taken the job.
        if self._begun and (kind is None or not issubclass(kind, SlurmCommandError) or kind is SlurmUnreachable):
            self.done()
        give_back(self._path, self._lock, remove=True)

    @property
    def is_locked(self) -> bool:
        """Whether it is known that no other process hands the run in: there may be no locks."""
        return self._lock != UNLOCKED

    @property
    def slurm(self) -> Slurm:
        """Slurm, whose commands hold the lock as long as they run, even when this process has been killed."""
        slurm = self._given or Slurm()
        return slurm.holding(self._lock) if self.is_locked else slurm

    def holding(self, backend: Backend) -> Backend:
        """The same of a backend."""
        if not isinstance(backend, SlurmBackend) or not self.is_locked:
            return backend
        same = copy.copy(backend)
        same.slurm = backend.slurm.holding(self._lock)
        return same

    def begin(self, *, indices: Sequence[int] | None = None, place: RunDir | None = None) -> None:
        """Write down that the script is going to be handed in.

        Args:
            indices: the tasks of an array, or the workers of a sweep, that it is for.
            place: where a new run is made before its directory appears.
        """
        self._begun = True
        parts = [self.run] if indices is None else [self.run.task(index) for index in indices]
        said = {"began": self._now(), "known": sorted(_jobs(self.run)), "offsets": ledger_sizes(parts)}
        note = (place or self.run).submitting
        write_json(note, {**said, "indices": None if indices is None else list(indices)})

    def done(self) -> None:
        self.run.submitting.unlink(missing_ok=True)
        self.run.resuming.unlink(missing_ok=True)

    def interrupted(self) -> Interrupted | None:
        """The hand-in before this one, when it was killed between ``begin`` and ``done``."""
        said = read_json(self.run.submitting) or read_json(self.run.resuming)
        return None if said is None else Interrupted(**{**said, "known": frozenset(said["known"])})

    def is_written_down(self, earlier: Interrupted) -> bool:
        """Whether the job of an interrupted hand-in is in the record."""
        return bool({_plain(job_id) for job_id in read_record(self.run).job_ids} - earlier.known)

    # -- what a hand-in that was cut off has come to -----------------------------------------------------------------

    def handed_in(self, earlier: Interrupted) -> list[str]:
        """The jobs of an interrupted hand-in, oldest first, that nobody has written down.

        Raises:
            ClusterError, SlurmCommandError: the queue does not answer, so that nobody can tell.
            Underway: the queue may show the job in a moment; only for who does not wait.
        """
        if read_record(self.run).backend == "local":
            return sorted({_plain(job_id) for job_id in self._processes(earlier).values()})
        found = self._looked_for(earlier, self._jobs_in_queue)
        return sorted(found, key=int)

    def workers_handed_in(self, earlier: Interrupted) -> dict[int, str]:
        """The same of a sweep: which job is which worker's."""
        if read_record(self.run).backend == "local":
            return self._processes(earlier)
        return self._looked_for(earlier, self._workers_in_queue)

    def _looked_for(self, earlier: Interrupted, look: Callable[[Interrupted], F]) -> F:
        began = self._script_began(earlier)
        most = SETTLING_SECONDS if self.is_locked else UNLOCKED_SETTLING_SECONDS
        what = f"waiting for up to {most:g} s: an earlier hand-in of {self.run.run_id} was cut off"
        with told_when_slow(f"{what}, and Slurm may show its job in a moment"):
            while not (found := look(earlier)) and self._now() - began <= most:
                if not self._wait:
                    raise Underway
                self._sleep(1.0)
        return found

    def _script_began(self, earlier: Interrupted) -> float:
        """When sbatch can have begun at the earliest: the note is written before the code is copied, the script after.
        Not later than now, whatever the clock of the file system says."""
        try:
            written = os.stat(self.run.script).st_mtime
        except OSError:
            return earlier.began
        return max(earlier.began, min(written, self._now()))

    def _jobs_in_queue(self, earlier: Interrupted) -> set[str]:
        started = {_plain(job_id) for run in (self.run, *_parts(self.run)) for job_id in _starts(run)}
        return {*self.slurm.jobs_of_script(self.run.script), *started} - earlier.known

    def _workers_in_queue(self, earlier: Interrupted) -> dict[int, str]:
        """Those that are over may be forgotten by the queue, but not by the workers' accounts."""
        started = {index: job_id for index in earlier.indices or () for job_id in _starts(self.run.task(index))}
        found = {**started, **self.slurm.workers_of_script(self.run.script)}
        return {index: job_id for index, job_id in found.items() if _plain(job_id) not in earlier.known}

    def _processes(self, earlier: Interrupted) -> dict[int, str]:
        """The jobs of the local backend, by task (0: the run itself). A process is written down before it may begin;
        one that is gone without a line in the ledger never began."""
        parts = {0: self.run} if earlier.indices is None else {one: self.run.task(one) for one in earlier.indices}
        found = {}
        for (index, part), before in zip(parts.items(), earlier.offsets or [0] * len(parts), strict=True):
            process = local.local_process(part)
            if process is None or _plain(process.job_id) in earlier.known:
                continue
            if process.is_alive or not process.is_here or ledger_sizes([part])[0] > before:
                found[index] = process.job_id
        return found


def _starts(run: RunDir) -> list[str]:
    """The jobs that have begun to write to the run, oldest first."""
    place = run.account if isinstance(run, WorkerDir) else run.ledger
    found = [str(line["job_id"]) for line, _ in read_lines(place) if line.get("job_id")]
    lease = read_json(run.lease)
    return [*found, *([] if lease is None else [str(lease["job_id"])])]


def _jobs(run: RunDir) -> set[str]:
    if not run.record.exists():
        return set()  # it is still being made
    records = [read_record(one) for one in (run, *_parts(run))]
    return {_plain(job_id) for record in records for job_id in (*record.job_ids, *record.links)}


def _parts(run: RunDir) -> list[RunDir]:
    """The tasks of an array."""
    size = None if isinstance(run, SweepDir) else read_record(run).array_size
    return [run.task(index) for index in range(size or 0)]


def _plain(job_id: str) -> str:
    return job_id.partition("_")[0]
