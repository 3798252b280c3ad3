"""Selects a worker's next trial: one of its own unfinished trials, else one of a dead worker's, else a new one.

A selected trial is claimed and its directory is written. While trials run, one new point is drawn ahead and enqueued
in the journal; the first free worker takes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.sweeps.compute_account import ComputeAccount
from hpcaccel.sweeps.definition import Definition, make_trial
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_notes import OwnershipNotes, is_surplus
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.retry import continued
from hpcaccel.sweeps.worker_jobs import gone_for_good

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import AskedTrial, SweepStudy

__all__ = ["ForeignWriters", "Impossible", "Nothing", "TrialQueue"]

LOOK_SECONDS = 60.0
"""Minimum interval between queries to Slurm about workers without a recent heartbeat."""
ASK_SECONDS, ASK_SECONDS_EACH = 15.0, 5.0
"""Interval between queries to Slurm about all workers: the larger of a constant and a time per worker, so that many
workers do not overload Slurm. A killed worker's last heartbeat remains recent for minutes, but Slurm reports the end of
its job at once."""
UNCLAIMED_SECONDS = 60.0
"""If a trial that was taken from the study has no claim for this long, its worker is assumed to have been killed before
it claimed the trial."""
BUSY_SECONDS = 20.0
"""Time after which a trial that another process was still running is tried again."""
MOST_SECONDS = 600.0
"""Maximum time for which an otherwise idle worker waits for trials that other processes are still running."""


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A trial whose values are not valid in the job spec."""

    number: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Why there is no trial to start; ``then`` is ``requeue`` if the worker's job should be requeued, else empty."""

    why: str
    then: str = ""


class TrialQueue:
    """Trials that a worker may run.

    Args:
        worker: the worker's index.
        token: identifies this tuner process; an earlier tuner of the same worker may still be running.
        study: returns the study. It is called only when needed, because loading Optuna and a large study takes a while.
        account: compute time of the whole sweep; the caller keeps it up to date.
    """

    def __init__(
        self,
        sweep: SweepDir,
        *,
        worker: int,
        token: str,
        definition: Definition,
        study: Callable[[], SweepStudy],
        record: StudyRecord,
        notes: OwnershipNotes,
        account: ComputeAccount,
        slurm: Slurm | None = None,
    ) -> None:
        self.sweep = sweep
        self.worker = worker
        self._token = token
        self._definition = definition
        self._study = study
        self._journal = JournalFile(sweep.journal)
        self._record = record
        self._notes = notes
        self._account = account
        self._slurm = slurm or Slurm()
        self._looked = float("-inf")
        """Time of the last query about workers without a recent heartbeat."""
        self._queried = time.monotonic() - ASK_SECONDS * random.random()  # spreads the workers' queries
        """Time of the last query about all workers."""
        self._dead: set[int] = set()
        self._used_up = False
        self.restarts: list[int] = []
        """Trials to run again in this worker at once."""
        self.left: set[int] = set()
        """Unfinished trials that this tuner does not start again."""
        self.foreign = ForeignWriters(
            lambda number: not self._record.trials[number].is_finished and self.is_ours(number)
        )

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim(self, number: int) -> bool:
        """Claim a trial for this worker; False if another tuner was first."""
        self._notes.read()
        epoch = self._notes.epoch(number) + 1
        mine = {"trial": number, "worker": self.worker, "epoch": epoch, "token": self._token}
        self._journal.append([{"hpcaccel": "claim", **mine, "time": round(time.time(), 3)}])
        self._notes.read()
        return self.is_ours(number)

    def is_ours(self, number: int) -> bool:
        """Whether this tuner process wrote the trial's newest claim, as far as the journal has been read."""
        claim = self._notes.claims.get(number)
        return claim is not None and (claim.worker, claim.token) == (self.worker, self._token)

    def halt_sweep(self, why: str) -> None:
        """Prevent all workers from starting trials until a user resumes the sweep."""
        self._journal.append([{"hpcaccel": "halt", "why": why, "time": time.time()}], sync=True)

    # -- trials that have begun -----------------------------------------------------------------------------------

    def begun(self, running: Collection[int]) -> int | None:
        """Claim a trial that has begun: one of this worker's, else one of a dead worker's. Returns its number, or None.

        Args:
            running: the trials that are running in this worker, which are left out.
        """
        if self.restarts:
            return self.restarts.pop()
        found = self._unfinished(running)
        return self.orphan(running) if found is None else found

    def _unfinished(self, running: Collection[int]) -> int | None:
        """Claim a trial that this worker left unfinished before a restart; None if there is none."""
        self._notes.read()
        for trial in self._resumable(running):
            if self._notes.owner(trial.number) == self.worker and self.claim(trial.number):
                return trial.number
        return None

    def orphan(self, running: Collection[int], *, at_once: bool = False) -> int | None:
        """Claim a trial of a dead worker, or one whose worker died before claiming it; None if there is none.

        Args:
            at_once: query Slurm now about all workers, however recent the last query is.
        """
        self._notes.read()
        if at_once:
            self._dead = gone_for_good(self.sweep, self._owners(), self._slurm, at_once=True)
            self._queried = self._looked = time.monotonic()
        for trial in self._resumable(running):
            owner = self._notes.owner(trial.number)
            left = _was_dropped(trial) if owner is None else owner != self.worker and owner in self._dead
            if left and self.claim(trial.number):
                return trial.number
        return None

    def look_for_dead(self) -> None:
        """Find dead workers by querying Slurm, at intervals, about all other owners of unfinished trials or only about
        those without a recent heartbeat. Call this while trials run, because Slurm may be slow."""
        now, pause = time.monotonic(), max(ASK_SECONDS, ASK_SECONDS_EACH * self._definition.spec.sweep.workers)
        if now - self._queried >= pause:
            doubtful = self._owners()
            self._queried = now
        elif now - self._looked >= LOOK_SECONDS:
            doubtful = {worker for worker in self._owners() if not self._account.is_fresh(worker)}
        else:
            return
        self._looked = now
        if doubtful:
            self._dead = self._dead - doubtful | gone_for_good(self.sweep, doubtful, self._slurm)

    def _owners(self) -> set[int]:
        """Other workers that own unfinished trials."""
        owners = {self._notes.owner(trial.number) for trial in self._running()}
        return {owner for owner in owners if owner is not None and owner != self.worker}

    def _resumable(self, running: Collection[int]) -> list[TrialRecord]:
        excluded = {*running, *self.left, *self.foreign.not_yet()}
        return [trial for trial in self._running() if trial.number not in excluded]

    def _running(self) -> list[TrialRecord]:
        trials = self._record.trials
        return [trial for trial in trials if trial.state == "running" and not is_surplus(trial.user_attrs)]

    # -- new trials -----------------------------------------------------------------------------------------------

    def new(self) -> int | Impossible | Nothing:
        """Claim a trial that has not begun, and write its directory. Returns its number, or why none can start."""
        while not isinstance(asked := self._ask(), Nothing):
            if self.claim(asked.number):
                return self._written(asked)
        return asked

    def _ask(self) -> AskedTrial | Nothing:
        from hpcaccel.sweeps.study import NoMore

        asked = self._study().ask()
        return Nothing(why=asked.why) if isinstance(asked, NoMore) else asked

    def write(self, number: int) -> int | Impossible:
        """Write a trial's directory if it does not exist. Returns the trial's number, or why the trial cannot start."""
        if self.sweep.trial(number).spec.exists():
            return number
        return self._written(self._study().again(number))

    def _written(self, asked: AskedTrial) -> int | Impossible:
        self._notes.read()
        try:
            job = continued(self.sweep, asked.job(self._definition.spec), self._record.trials[asked.number].user_attrs)
        except SpecError as error:
            return Impossible(number=asked.number, why=str(error))
        point = {**asked.point, **({} if asked.seed is None else {"runtime.seed": asked.seed})}
        make_trial(self.sweep, asked.number, definition=self._definition, job=job, overrides=point)
        return asked.number

    def draw_ahead(self) -> None:
        """Draw a trial, write its directory and enqueue it, unless a waiting trial already has a directory."""
        self._notes.read()
        waiting = [trial for trial in self._record.trials if trial.state == "waiting"]
        if self._used_up or any(self.sweep.trial(trial.number).spec.exists() for trial in waiting):
            return
        asked = self._ask()
        if isinstance(asked, Nothing):
            self._used_up = True
            return
        if self.claim(asked.number):  # claimed, because this process may be killed before it puts the trial back
            self._written(asked)
            self._study().put_back(asked.number)


def _was_dropped(trial: TrialRecord) -> bool:
    return trial.started is not None and time.time() - trial.started > UNCLAIMED_SECONDS


class ForeignWriters:
    """Trials of this worker that another process is still running: that process was considered dead, or is exiting.

    Args:
        is_wanted: called with a trial's number; returns whether this worker still has to run that trial.
    """

    def __init__(self, is_wanted: Callable[[int], bool]) -> None:
        self._is_wanted = is_wanted
        self._at: dict[int, float] = {}
        self._since = time.monotonic()

    def add(self, number: int) -> None:
        self._at[number] = time.monotonic() + BUSY_SECONDS

    def reset_wait(self) -> None:
        """Restart the waiting time, because another trial of this worker has ended."""
        self._since = time.monotonic()

    def not_yet(self) -> set[int]:
        """Trials that should not be tried yet."""
        for number in [number for number in self._at if not self._is_wanted(number)]:
            del self._at[number]
        return {number for number, at in self._at.items() if at > time.monotonic()}

    def look_again_at(self, latest: float) -> float:
        """Time of the next try, in monotonic seconds, but no later than ``latest``."""
        return min([latest, *self._at.values()])

    def is_worth_waiting(self) -> bool:
        """Whether other processes are still running trials of this worker and the waiting time is not over."""
        self.not_yet()
        return bool(self._at) and time.monotonic() - self._since < MOST_SECONDS

    def __bool__(self) -> bool:
        return bool(self._at)
