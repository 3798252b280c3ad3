"""Whether a worker may begin another trial: the sweep's budget, and the time that its allocation has left."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.sweeps.budget import Account, Budget, in_hours, too_small, too_small_for_any, typical
from hpcaccel.sweeps.definition import Definition
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.results import GPU_SECONDS
from hpcaccel.sweeps.running_trial import Course
from hpcaccel.sweeps.tuner_protocol import Hello

__all__ = ["Allowance"]

LOOK_SECONDS = 30.0
"""So often the accounts of all workers are read; between, those that live are taken to live on."""


class Allowance:
    """Args:
    record: the study; its reading is the caller's.
    """

    def __init__(self, sweep: SweepDir, definition: Definition, hello: Hello, *, record: StudyRecord) -> None:
        launch = definition.launch
        ranks = int(launch["nodes"]) * int(launch["ranks_per_node"])
        self.share = (hello.gpus or ranks) / hello.slots
        """What one of this worker's trials costs in a second, in GPU-seconds."""
        self._id = sweep.run_id
        self._budget = Budget(max_gpu_hours=definition.spec.sweep.max_gpu_hours)
        self.account = Account(sweep, ranks=ranks)
        """Read every few seconds."""
        self._record = record
        self._read_at = float("-inf")
        self._end_time = hello.end_time
        self._warning_seconds = float(launch.get("warning_seconds") or 0)
        self._resumable = launch["stop"] == "cooperative"
        self._startup: list[float] = []
        """How long trials took here to their first step, in seconds."""
        self._learned = False
        self._over = ""
        """What was said when the budget was used up before any trial had ended."""

    # -- the budget -----------------------------------------------------------------------------------------------

    def spent(self) -> float:
        """GPU-seconds of all workers, as of some seconds ago."""
        if time.monotonic() - self._read_at > LOOK_SECONDS:
            self._read_at = time.monotonic()
            self.account.read()
        return self.account.gpu_seconds()

    def is_used_up(self, courses: Iterable[Course] = ()) -> str:
        """Why what runs must end; empty where it may go on.

        Args:
            courses: trials of this worker's, of which something may be told.
        """
        spent = self.spent()
        if not self._budget.is_used_up(spent):
            return ""
        furthest = max(courses, key=lambda course: course.follower.step or 0, default=None)
        if furthest is not None and not any(trial.state in ("complete", "pruned") for trial in self._record.trials):
            used = min(spent, (time.time() - furthest.began + furthest.spent().seconds) * self.share)
            step, total = furthest.steps()
            self._over = too_small(
                self._budget, sweep=self._id, trial=furthest.number, used=used, step=step, total=total
            )
        if not self._over and not self._record.trials:
            self._over = too_small_for_any(self._budget, spent, sweep=self._id)
        return self._over or f"max_gpu_hours is {self._budget.max_gpu_hours:g}, and {in_hours(spent)} are used up"

    def against_another(self) -> str:
        """Why no other trial may begin in this worker; empty where one may."""
        why = ""
        if self._budget.max_gpu_hours is not None:
            why = self._budget.against_a_trial(self.spent(), usual=self._usual(), running=self._running())
        if not why and self.is_short_of_time():
            why = "the time that is left in this allocation is too short for another trial"
        return why

    def _usual(self) -> float:
        return typical([trial.user_attrs[GPU_SECONDS] for trial in self._record.trials if _has_cost(trial)])

    def _running(self) -> list[float]:
        """What each trial that runs somewhere has used, about: interruptions count as if it had run."""
        now = time.time()
        running = [trial for trial in self._record.trials if trial.state == "running"]
        return [(now - trial.started) * self.share for trial in running if trial.started is not None]

    # -- the time -------------------------------------------------------------------------------------------------

    def learn(self, course: Course) -> None:
        """A trial has ended in this allocation: what it says of those to come."""
        self._learned = True
        if (seconds := course.seconds_to_first_step()) is not None:
            self._startup.append(seconds)

    def is_short_of_time(self) -> bool:
        """Whether a trial that starts now would hardly get anywhere before the allocation ends.

        One that saves when it is asked to stop loses nothing but its start-up: twice that has to be left. One that
        cannot be continued needs its whole time. The first trial of an allocation always starts.
        """
        if self._end_time is None or not self._learned:
            return False
        left = self._end_time - time.time() - self._warning_seconds
        if self._resumable and self._startup:
            return left < 2 * max(self._startup)
        return left < self._usual() / self.share


def _has_cost(trial: TrialRecord) -> bool:
    return trial.state in ("complete", "pruned") and GPU_SECONDS in trial.user_attrs
