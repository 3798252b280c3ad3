"""One new job for one resume, wherever an earlier resume of the run has ended.

Before a run's script is handed in again, a note in its directory says that this is about to happen; it is taken away
once the job is in the run's record. Who finds that note knows that a resume was killed in between, and finds out what
became of it: a job in the record is its answer; a job that was handed in and not written down is looked for by its
script. A lock for each run lets resumes wait for each other, sbatch included: one that was killed counts as ended only
when its sbatch has ended, too.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from hpcaccel.errors import RunBusy, SlurmCommandError
from hpcaccel.rundir import RunDir, SweepDir, read_json, read_lines, state_home, write_json
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.facts import read_record
from hpcaccel.submission.locks import slurm_holding, take
from hpcaccel.submission.once import SETTLING_SECONDS

__all__ = ["Interrupted", "Turn"]

LEAVING_SECONDS = 120.0
"""How long jobs that are taken back may take to leave the queue."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """An earlier resume that has not come to its end."""

    began: float
    known: frozenset[str]
    """The jobs, by plain id, that the run had before."""
    indices: list[int] | None
    """The tasks it was for; None: the run is no array."""
    offsets: list[int]
    """Where the ledger of each task ended."""


class Turn:
    """The one resume of a run that is under way, for the length of a ``with`` block; another one waits meanwhile.

    Args:
        run: the run, the sweep or the parent folder of an array.
        slurm: None: Slurm's own commands, which hold the lock as long as they run.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        slurm: Slurm | None = None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self._given = slurm
        self._now, self._sleep = now, sleep
        self._lock = -1
        self._begun = False

    def __enter__(self) -> Turn:
        name = hashlib.sha256(str(self.run.path).encode()).hexdigest()[:32]
        self._lock = take(state_home() / "hpcaccel" / "resumes" / f"{name}.lock")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # It failed, and nothing was handed in; but a controller that did not answer may have taken the job.
        if self._begun and (kind is None or not issubclass(kind, SlurmCommandError)):
            self.done()
        os.close(self._lock)

    @property
    def slurm(self) -> Slurm:
        return self._given or slurm_holding(self._lock)

    def begin(self, *, indices: Sequence[int] | None = None, offsets: Sequence[int] = ()) -> None:
        """Write down that the script is going to be handed in."""
        self._begun = True
        said = {"began": self._now(), "known": sorted(_jobs(self.run)), "offsets": list(offsets)}
        write_json(self.run.resuming, {**said, "indices": None if indices is None else list(indices)})

    def done(self) -> None:
        self.run.resuming.unlink(missing_ok=True)

    def interrupted(self) -> Interrupted | None:
        """The resume before this one, when it was killed between ``begin`` and ``done``."""
        said = read_json(self.run.resuming)
        return None if said is None else Interrupted(**{**said, "known": frozenset(said["known"])})

    def is_written_down(self, earlier: Interrupted) -> bool:
        """Whether the job of an interrupted resume is in the record."""
        return bool({_plain(job_id) for job_id in read_record(self.run).job_ids} - earlier.known)

    def handed_in(self, earlier: Interrupted) -> list[str]:
        """The jobs of an interrupted resume, oldest first, that nobody has written down.

        Raises:
            ClusterError, SlurmCommandError: the queue does not answer, so that nobody can tell.
        """
        if read_record(self.run).backend == "local":
            return []  # its processes are written down by themselves
        while True:
            found = {*self.slurm.jobs_of_script(self.run.script), *self._started()} - earlier.known
            if found or self._now() - earlier.began > SETTLING_SECONDS:
                return sorted(found, key=int)
            self._sleep(1.0)

    def take_back(self) -> None:
        """Cancel what an interrupted resume of a sweep has handed in: which worker is which task, only it knew.

        Raises:
            RunBusy: that takes a long time to end.
        """
        earlier = self.interrupted()
        if earlier is None or self.is_written_down(earlier):
            return
        jobs = self.handed_in(earlier)
        for job_id in jobs:
            self.slurm.cancel(job_id)
        deadline = self._now() + LEAVING_SECONDS
        while jobs and self.slurm.queue(jobs):
            if self._now() > deadline:
                raise RunBusy(
                    f"an earlier resume of {self.run.run_id} was killed, and its jobs ({', '.join(jobs)}) are being "
                    "ended: resume it again in a few minutes"
                )
            self._sleep(1.0)

    def _started(self) -> list[str]:
        """Jobs in the ledger of the run: one that is over may be forgotten by the queue."""
        places = [self.run, *_parts(self.run)]
        return [_plain(str(line["job_id"])) for run in places for line, _ in read_lines(run.ledger) if "job_id" in line]


def _jobs(run: RunDir) -> set[str]:
    records = [read_record(one) for one in (run, *_parts(run))]
    return {_plain(job_id) for record in records for job_id in (*record.job_ids, *record.links)}


def _parts(run: RunDir) -> list[RunDir]:
    """The tasks of an array."""
    size = None if isinstance(run, SweepDir) else read_record(run).array_size
    return [run.task(index) for index in range(size or 0)]


def _plain(job_id: str) -> str:
    return job_id.partition("_")[0]
