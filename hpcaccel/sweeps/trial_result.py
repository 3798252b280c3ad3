"""Decides the outcome of a trial whose ranks have exited, and records it in the study."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpcaccel.sweeps.journal_notes import BUDGET, DETAIL, DIVERGED, ERROR_CLASS, METRIC, is_surplus
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, best
from hpcaccel.sweeps.running_trial import RunningTrial
from hpcaccel.sweeps.tuner_protocol import Ended

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = [
    "EndCounts",
    "TrialOutcome",
    "decide_trial",
    "describe_outcome",
    "hopeless",
    "record_outcome",
]

MOST_INTERRUPTIONS = 3
"""A trial interrupted more often than this under one tuner counts as failed; the usual cause is lack of memory."""
FIRST_WITHOUT_METRIC = 3
"""A sweep stops after this many trials if none of them has logged the metric."""
FIRST_FAILED = 5
"""A sweep stops after this many trials if all of them failed with the same error class."""


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """What to do with a trial whose ranks have exited: record it, run it again in this worker, or leave it unfinished
    for now (``left``), to be continued by this worker or another."""

    state: Literal["complete", "pruned", "failed", "again", "left"]
    values: tuple[float, ...] = ()
    why: str = ""
    error_class: str | None = None


class EndCounts:
    """Counts the failures and interruptions of each trial since the tuner started, and decides the trial's outcome.

    Args:
        retries: ``sweep.retries``.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failures: Counter[int] = Counter()
        self._interruptions: Counter[int] = Counter()

    def decide(self, trial: RunningTrial, ended: Ended, *, failures: int, stopping: bool) -> TrialOutcome:
        """Count the end of a trial and decide its outcome. ``failures`` counts the failures in the trial's ledger."""
        number = trial.number
        if ended.error_class not in ("busy", "disk"):
            self._failures[number] += ended.reason == "failed" and ended.decision == "end"
        self._interruptions[number] += ended.decision == "requeue"
        return decide_trial(
            ended,
            values=trial.values,
            never_logged=trial.follower.never_logged,
            stop_reason=trial.stop_reason,
            over_budget=trial.over_budget,
            failures=max(failures, self._failures[number]),
            interruptions=self._interruptions[number],
            retries=self._retries,
            stopping=stopping,
        )


def decide_trial(
    ended: Ended,
    *,
    values: Sequence[float] | None,
    never_logged: str,
    stop_reason: str,
    over_budget: bool,
    failures: int,
    interruptions: int,
    retries: int,
    stopping: bool,
) -> TrialOutcome:
    """Decide the outcome of a trial whose ranks have exited.

    Args:
        values: the last value of each metric; None if any was not logged.
        never_logged: message about the metrics that were not logged.
        stop_reason: why a tuner requested that the trial stop; empty if none did.
        over_budget: whether the trial was stopped because the sweep's budget was used up.
        failures: number of the trial's failures, including this one.
        interruptions: number of the trial's interruptions since the tuner started, including this one.
        stopping: whether the worker starts no more trials.
    """
    if ended.reason == "pruned":
        return TrialOutcome(
            state="pruned", why=stop_reason or ended.detail, error_class=BUDGET if over_budget else None
        )
    if ended.reason == "completed":
        return _completed(values, never_logged)
    if stopping or ended.error_class in ("busy", "disk") or ended.decision == "pause":
        return TrialOutcome(state="left", why=ended.detail)
    if ended.decision != "end":
        # If the cause affects more than this trial, the worker's next message is StopTrials, and no trial starts again.
        return _interrupted(ended, interruptions)
    if ended.reason == "cancelled":
        return TrialOutcome(state="failed", why="cancelled by request", error_class="cancelled")
    why = ended.detail or ended.reason
    if failures <= retries:
        return TrialOutcome(state="again", why=why, error_class=ended.error_class)
    return TrialOutcome(state="failed", why=why, error_class=ended.error_class or ended.reason)


def _interrupted(ended: Ended, interruptions: int) -> TrialOutcome:
    why = ended.detail or ended.reason
    if interruptions <= MOST_INTERRUPTIONS:
        return TrialOutcome(state="again", why=why)
    return TrialOutcome(
        state="failed", why=f"{why} ({interruptions} times)", error_class=ended.error_class or ended.reason
    )


def _completed(values: Sequence[float] | None, never_logged: str) -> TrialOutcome:
    if values is None:
        return TrialOutcome(state="failed", why=never_logged, error_class=METRIC)
    if not all(map(math.isfinite, values)):
        # As in Optuna, a trial that returns NaN has failed. It is not retried: the result would probably be the same.
        shown = ", ".join(f"{value:g}" for value in values)
        return TrialOutcome(state="failed", why=f"the last value is not finite: {shown}", error_class=DIVERGED)
    return TrialOutcome(state="complete", values=tuple(values))


def record_outcome(
    study: SweepStudy,
    number: int,
    outcome: TrialOutcome,
    attributes: Mapping[str, object],
    *,
    last: tuple[int, float] | None = None,
) -> None:
    """Record the end of a trial in the study.

    Args:
        attributes: user attributes to set before the end is recorded.
        last: the last logged step and value of the first metric.
    """
    reasons = {ERROR_CLASS: outcome.error_class, DETAIL: outcome.why or None}
    study.mark(number, {name: value for name, value in {**attributes, **reasons}.items() if value is not None})
    if outcome.state == "complete":
        study.complete(number, outcome.values)
    elif outcome.state == "pruned":
        study.prune(number, last=last)
    else:
        study.fail(number)


def describe_outcome(outcome: TrialOutcome, trials: Sequence[TrialRecord], goal: Goal) -> str:
    """Text for the log: the outcome of a trial, and the best trial so far."""
    text: str = outcome.state
    if outcome.state == "complete":
        text += f", {_values(goal, outcome.values)}"
    elif outcome.state == "failed":
        text += f", {outcome.why}"
    leader = best(trials, goal)
    if leader is not None:
        text += f"; best so far: trial {leader.trial.number}, {_values(goal, leader.values)}"
    return text


def _values(goal: Goal, values: Sequence[float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in zip(goal.metrics, values, strict=True))


def hopeless(trials: Sequence[TrialRecord], *, since: float = 0.0) -> str:
    """Why the sweep should stop because its first trials all failed in the same way; empty if it should continue.

    Args:
        since: when a user last resumed the sweep (seconds since the epoch); earlier failures are ignored.
    """
    counted = [trial for trial in trials if _counts(trial)]
    if any(trial.state != "failed" for trial in counted):
        return ""
    ended = sorted((trial for trial in counted if (trial.ended or 0.0) >= since), key=lambda trial: trial.ended or 0.0)
    classes = Counter(trial.user_attrs.get(ERROR_CLASS) for trial in ended)
    if len(classes) != 1:
        return ""
    (found,) = classes
    if found is None or len(ended) < (FIRST_WITHOUT_METRIC if found == METRIC else FIRST_FAILED):
        return ""
    remedy = ". Log the metric, or start a sweep with another sweep.metric" if found == METRIC else ""
    return f"the first {len(ended)} trials all failed ({found}): {ended[0].user_attrs.get(DETAIL, '')}{remedy}"


def _counts(trial: TrialRecord) -> bool:
    by_hand = trial.user_attrs.get(ERROR_CLASS) == "cancelled"
    return trial.is_finished and not by_hand and not is_surplus(trial.user_attrs)
