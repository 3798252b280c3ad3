"""Tidying up behind trials, put off until the next one runs: removing files takes time, and GPUs should not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.sweeps.cleanup import Housekeeping
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.ownership import Notes
from hpcaccel.sweeps.results import Goal, best_first
from hpcaccel.sweeps.sources import let_go
from hpcaccel.sweeps.trial_attrs import FROM
from hpcaccel.sweeps.trial_result import BUDGET, ERROR_CLASS

__all__ = ["Chores"]


class Chores:
    """Args:
    keep: of how many of the best finished trials checkpoints stay; None: of all.
    record: the study; its reading is the caller's.
    """

    def __init__(self, sweep: SweepDir, *, keep: int | None, goal: Goal, record: StudyRecord) -> None:
        self._sweep = sweep
        self._housekeeping = Housekeeping(sweep, keep=keep)
        self._goal = goal
        self._record = record
        self._open: deque[Callable[[], None]] = deque()

    def add(self, number: int) -> None:
        """A trial has ended."""
        self._open.append(lambda: self._behind(self._record.trials[number]))

    def catch_up(self, worker: int, notes: Notes) -> None:
        """An earlier chooser of this worker may have died between telling and tidying."""
        for number, claim in list(notes.claims.items()):
            trial = self._record.trials[number]
            if claim.worker == worker and trial.is_finished and (trial.state != "complete" or FROM in trial.user_attrs):
                self.add(number)
        self._open.append(lambda: self._housekeeping.drop_worse(best_first(self._record.trials, self._goal)))

    def do(self) -> list[str]:
        """Do them all; what could not be done, for people. It costs space, and no trial."""
        problems = []
        while self._open:
            try:
                self._open.popleft()()
            except OSError as error:
                problems.append(f"cannot tidy up: {error}")
        return problems

    def _behind(self, trial: TrialRecord) -> None:
        if trial.state == "complete":
            self._housekeeping.after_finished(trial.number, best_first(self._record.trials, self._goal))
        elif trial.state == "pruned" and trial.user_attrs.get(ERROR_CLASS) != BUDGET:
            self._housekeeping.after_pruned(trial.number)
        else:
            self._housekeeping.after_interrupted(trial.number)
        if (source := let_go(self._sweep, trial, self._record.trials)) is not None:
            self._housekeeping.after_succeeded(self._record.trials[source], best_first(self._record.trials, self._goal))
