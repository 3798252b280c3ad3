"""Which trial a worker runs next: what is its own, what dead workers have left, then a point that nobody had.

Whatever it chooses it has claimed, and the trial's directory is written. One new point is drawn ahead, while trials
run, and put among those that wait in the journal: the worker that is free first takes it, this one or another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.sweeps.budget import Account
from hpcaccel.sweeps.definition import Definition
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.ownership import Notes, gone_for_good
from hpcaccel.sweeps.retry import continued
from hpcaccel.sweeps.trial_attrs import is_surplus
from hpcaccel.sweeps.trial_dir import make_trial

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import Asked, SweepStudy

__all__ = ["Choosing", "Impossible", "Nothing"]

LOOK_SECONDS = 60.0
"""So often at most Slurm is asked whether silent workers are dead."""
ASK_SECONDS, ASK_SECONDS_EACH = 15.0, 5.0
"""So often, and less often where there are many workers, Slurm is asked about those too that are not silent: after a
kill their last sign stays young for minutes, and Slurm knows at once. All workers together ask once in five seconds."""
UNCLAIMED_SECONDS = 60.0
"""A trial that was begun so long ago and that nobody has claimed belongs to a worker that was killed in between."""


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A trial whose values the job spec refuses."""

    number: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Why there is no trial to start, and what is to follow for this worker: its end, or ``requeue``."""

    why: str
    then: str = ""


class Choosing:
    """Args:
    worker: this one.
    token: names this start of it: an earlier one may believe that it lives.
    study: opens it, once. What was begun before needs none: loading Optuna and a large study takes a while.
    account: of the whole sweep; its reading is the caller's.
    """

    def __init__(
        self,
        sweep: SweepDir,
        *,
        worker: int,
        token: str,
        definition: Definition,
        study: Callable[[], SweepStudy],
        journal: JournalFile,
        record: StudyRecord,
        notes: Notes,
        account: Account,
        slurm: Slurm | None = None,
    ) -> None:
        self.sweep = sweep
        self.worker = worker
        self._token = token
        self._definition = definition
        self._study = study
        self._journal = journal
        self._record = record
        self._notes = notes
        self._account = account
        self._slurm = slurm or Slurm()
        self._looked = float("-inf")
        """When silent workers were looked at last, and when all were."""
        self._asked = time.monotonic() - ASK_SECONDS * random.random()  # not all workers in the same moment
        self._dead: set[int] = set()
        self._used_up = False

    # -- whose it is ----------------------------------------------------------------------------------------------

    def claim(self, number: int) -> bool:
        """Make a trial this worker's; False where another one was first."""
        self._notes.read()
        epoch = self._notes.epoch(number) + 1
        mine = {"trial": number, "worker": self.worker, "epoch": epoch, "token": self._token}
        self._journal.append([{"hpcaccel": "claim", **mine, "time": round(time.time(), 3)}])
        self._notes.read()
        return self.is_ours(number)

    def is_ours(self, number: int) -> bool:
        """Whether the newest claim is this one's, as of the last reading."""
        claim = self._notes.claims.get(number)
        return claim is not None and (claim.worker, claim.token) == (self.worker, self._token)

    # -- what was begun before ------------------------------------------------------------------------------------

    def unfinished(self, passing_over: Collection[int]) -> int | None:
        """A trial that an earlier start of this worker has left."""
        self._notes.read()
        for trial in self._running(passing_over):
            if self._notes.owner(trial.number) == self.worker and self.claim(trial.number):
                return trial.number
        return None

    def orphan(self, passing_over: Collection[int], *, at_once: bool = False) -> int | None:
        """A trial that a dead worker has left.

        Args:
            at_once: ask Slurm now, however lately it was asked, and about all workers.
        """
        self._notes.read()
        if at_once:
            self._dead = gone_for_good(self.sweep, self._owners(), self._slurm, at_once=True)
            self._asked = self._looked = time.monotonic()
        for trial in self._running(passing_over):
            owner = self._notes.owner(trial.number)
            left = _was_dropped(trial) if owner is None else owner != self.worker and owner in self._dead
            if left and self.claim(trial.number):
                return trial.number
        return None

    def look_for_dead(self) -> None:
        """Find out now and then which workers are dead, more often of those that have given no sign for a while where
        there are many. To be called while trials run: Slurm may take its time."""
        now, pause = time.monotonic(), max(ASK_SECONDS, ASK_SECONDS_EACH * self._definition.spec.sweep.workers)
        if now - self._asked >= pause:
            doubtful = self._owners()
            self._asked = now
        elif now - self._looked >= LOOK_SECONDS:
            doubtful = {worker for worker in self._owners() if not self._account.is_fresh(worker)}
        else:
            return
        self._looked = now
        if doubtful:
            self._dead = self._dead - doubtful | gone_for_good(self.sweep, doubtful, self._slurm)

    def _owners(self) -> set[int]:
        """Other workers that trials belong to which nobody has ended."""
        owners = {self._notes.owner(trial.number) for trial in self._running(())}
        return {owner for owner in owners if owner is not None and owner != self.worker}

    def _running(self, passing_over: Collection[int]) -> list[TrialRecord]:
        return [
            trial
            for trial in self._record.trials
            if trial.state == "running" and trial.number not in passing_over and not is_surplus(trial.user_attrs)
        ]

    # -- what is new ----------------------------------------------------------------------------------------------

    def new(self) -> int | Impossible | Nothing:
        """A trial that nobody has begun."""
        while not isinstance(asked := self._ask(), Nothing):
            if self.claim(asked.number):
                return self._written(asked)
        return asked

    def _ask(self) -> Asked | Nothing:
        from hpcaccel.sweeps.study import NoMore

        asked = self._study().ask()
        return Nothing(why=asked.why) if isinstance(asked, NoMore) else asked

    def write(self, number: int) -> int | Impossible:
        """See to it that the directory of a trial is there that was begun before, however far that had come."""
        if self.sweep.trial(number).spec.exists():
            return number
        return self._written(self._study().again(number))

    def _written(self, asked: Asked) -> int | Impossible:
        self._notes.read()
        try:
            job = continued(self.sweep, asked.job(self._definition.spec), self._record.trials[asked.number].user_attrs)
        except SpecError as error:
            return Impossible(number=asked.number, why=str(error))
        point = {**asked.point, **({} if asked.seed is None else {"runtime.seed": asked.seed})}
        make_trial(self.sweep, asked.number, definition=self._definition, job=job, overrides=point)
        return asked.number

    def draw_ahead(self) -> None:
        """Draw a point and write its directory, unless one waits already."""
        self._notes.read()
        waiting = [trial for trial in self._record.trials if trial.state == "waiting"]
        if self._used_up or any(self.sweep.trial(trial.number).spec.exists() for trial in waiting):
            return
        asked = self._ask()
        if isinstance(asked, Nothing):
            self._used_up = True
            return
        if self.claim(asked.number):  # until it is put back: this process may be killed before that
            self._written(asked)
            self._study().put_back(asked.number)


def _was_dropped(trial: TrialRecord) -> bool:
    return trial.started is not None and time.time() - trial.started > UNCLAIMED_SECONDS
