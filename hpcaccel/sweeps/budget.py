"""The budget of a sweep in GPU-seconds, and whether a worker may start another trial."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.formatting import gpu_hours
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.compute_account import ComputeAccount
from hpcaccel.sweeps.journal_notes import GPU_SECONDS
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord

if TYPE_CHECKING:  # views read accounts, and start faster without the spec
    from hpcaccel.sweeps.definition import Definition
    from hpcaccel.sweeps.running_trial import RunningTrial
    from hpcaccel.sweeps.tuner_protocol import Hello

__all__ = [
    "Allowance",
    "Budget",
    "in_hours",
    "raise_it",
    "too_small",
    "typical",
]

READ_SECONDS = 30.0
"""Interval at which the accounts of all workers are read. In between, live workers are assumed to remain alive."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of a sweep, ``sweep.max_gpu_hours``. Its methods take GPU-seconds."""

    max_gpu_hours: float | None

    def is_used_up(self, spent: float) -> bool:
        return self.max_gpu_hours is not None and spent >= self.max_gpu_hours * 3600

    def against_a_trial(self, spent: float, *, usual: float, running: Iterable[float]) -> str:
        """Why no further trial may start; empty if one may.

        Args:
            usual: typical cost of a trial; 0 if none has ended yet.
            running: cost so far of each running trial.
        """
        if self.max_gpu_hours is None:
            return ""
        if self.is_used_up(spent):
            return f"max_gpu_hours is {self.max_gpu_hours:g}, and {in_hours(spent)} have been used"
        promised = sum(max(0.0, usual - used) for used in running)
        if spent + promised + usual <= self.max_gpu_hours * 3600:
            return ""
        others = f", the running trials will need another {in_hours(promised)}" if promised else ""
        return (
            f"max_gpu_hours is {self.max_gpu_hours:g}: {in_hours(spent)} have been used{others}, and a new trial would "
            f"take about {in_hours(usual)}"
        )


def typical(costs: Sequence[float]) -> float:
    """Expected cost of the next trial: the mean of ``costs`` (of complete and pruned trials); 0 if there are none."""
    return sum(costs) / len(costs) if costs else 0.0


def too_small(budget: Budget, *, sweep: str, trial: int, used: float, step: int | None, total: int | None) -> str:
    """Message for a budget that was used up before any trial was complete or pruned.

    Args:
        sweep: the sweep's id.
        trial: number of the trial that advanced furthest.
        used: GPU-seconds of that trial.
        step: the largest step that the trial logged; None if unknown.
        total: the trial's total number of steps; None if unknown.
    """
    text = f"max_gpu_hours is {budget.max_gpu_hours:g}, which is too little for one trial: "
    whole = used
    if step and total and total > step:
        whole = used * total / step
        text += f"trial {trial} has used {in_hours(used)} for {step} of {total} steps, so it would need about "
        text += in_hours(whole)
    else:
        text += f"trial {trial} has used {in_hours(used)} and has not finished"
    return f"{text}. {raise_it(budget, sweep=sweep, spent=whole)}"


def raise_it(budget: Budget, *, sweep: str, spent: float) -> str:
    """Advice to continue with a larger budget, including the command. It suggests twice the budget, or twice the
    GPU-seconds ``spent`` if that is more."""
    hours = 2 * max(budget.max_gpu_hours or 0.0, spent / 3600)
    shown = f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
    return (
        "To continue, raise the budget to this value or more: "
        f"`hpcaccel sweep resume {sweep} sweep.max_gpu_hours={shown}`"
    )


def in_hours(gpu_seconds: float) -> str:
    """GPU-seconds as text in GPU-hours, such as ``12.3 GPU-hours``."""
    return f"{gpu_hours(gpu_seconds / 3600)} GPU-hours"


class Allowance:
    """Decides whether a worker may start trials, from the sweep's budget and the time left in the worker's allocation.

    Args:
        record: the study; the caller keeps it up to date.
    """

    def __init__(self, sweep: SweepDir, definition: Definition, hello: Hello, *, record: StudyRecord) -> None:
        launch = definition.launch
        ranks = launch.ranks
        self.share = (hello.gpus or ranks) / hello.slots
        """Cost of one of this worker's trials, in GPU-seconds per second."""
        self._id = sweep.run_id
        self._budget = Budget(max_gpu_hours=definition.spec.sweep.max_gpu_hours)
        self.account = ComputeAccount(sweep, ranks=ranks)
        """Compute time of all workers."""
        self._record = record
        self._read_at = float("-inf")
        self._end_time = hello.end_time
        self._warning_seconds = float(launch.warning_seconds or 0)
        self._resumable = launch.cooperative
        self._startup: list[float] = []
        """Start-up times (seconds until the first step) of the trials that have ended under this tuner."""
        self._any_ended = False
        self._too_small = ""
        """Message if the budget was used up before any trial was complete or pruned."""

    # -- the budget -----------------------------------------------------------------------------------------------

    def spent(self) -> float:
        """GPU-seconds used by all workers, from accounts that were read at most ``READ_SECONDS`` ago."""
        if time.monotonic() - self._read_at > READ_SECONDS:
            self._read_at = time.monotonic()
            self.account.read()
        return self.account.gpu_seconds()

    def is_used_up(self, trials: Iterable[RunningTrial] = ()) -> str:
        """Why running trials must stop; empty if they may continue.

        Args:
            trials: running trials of this worker, for the message.
        """
        spent = self.spent()
        if not self._budget.is_used_up(spent):
            return ""
        furthest = max(trials, key=lambda trial: trial.follower.step or 0, default=None)
        if furthest is not None and not any(trial.state in ("complete", "pruned") for trial in self._record.trials):
            used = min(spent, (time.time() - furthest.began + furthest.spent().seconds) * self.share)
            step, total = furthest.steps()
            self._too_small = too_small(
                self._budget, sweep=self._id, trial=furthest.number, used=used, step=step, total=total
            )
        if not self._too_small and not self._record.trials:
            self._too_small = (
                f"max_gpu_hours is {self._budget.max_gpu_hours:g}, and {in_hours(spent)} were used before the first "
                f"trial started. {raise_it(self._budget, sweep=self._id, spent=spent)}"
            )
        used_up = f"max_gpu_hours is {self._budget.max_gpu_hours:g}, and {in_hours(spent)} have been used"
        return self._too_small or used_up

    def against_another(self) -> str:
        """Why no further trial may start in this worker; empty if one may."""
        why = ""
        if self._budget.max_gpu_hours is not None:
            why = self._budget.against_a_trial(self.spent(), usual=self._usual(), running=self._running())
        if not why and self.is_short_of_time():
            why = "the time left in this allocation is too short for another trial"
        return why

    def _usual(self) -> float:
        return typical([trial.user_attrs[GPU_SECONDS] for trial in self._record.trials if _has_cost(trial)])

    def _running(self) -> list[float]:
        """Approximate cost so far of each running trial of all workers; interruptions count as running time."""
        now = time.time()
        running = [trial for trial in self._record.trials if trial.state == "running"]
        return [(now - trial.started) * self.share for trial in running if trial.started is not None]

    # -- the time -------------------------------------------------------------------------------------------------

    def learn(self, trial: RunningTrial) -> None:
        """Record the start-up time of a trial that has ended, to estimate that of later trials."""
        self._any_ended = True
        if (seconds := trial.seconds_to_first_step()) is not None:
            self._startup.append(seconds)

    def is_short_of_time(self) -> bool:
        """Whether the allocation ends too soon for another trial.

        A trial that saves when stopped loses only its start-up time, so twice that time must be left. A trial that
        cannot be continued, or whose start-up time is unknown, needs its full run time. Returns False until a trial has
        ended under this tuner, or if the end of the allocation is unknown.
        """
        if self._end_time is None or not self._any_ended:
            return False
        left = self._end_time - time.time() - self._warning_seconds
        if self._resumable and self._startup:
            return left < 2 * max(self._startup)
        return left < self._usual() / self.share


def _has_cost(trial: TrialRecord) -> bool:
    return trial.state in ("complete", "pruned") and GPU_SECONDS in trial.user_attrs
