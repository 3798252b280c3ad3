"""What the study is told when a trial's ranks have left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, best
from hpcaccel.sweeps.trial_attrs import is_surplus
from hpcaccel.sweeps.tuner_protocol import Ended

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = ["BUDGET", "DETAIL", "ERROR_CLASS", "METRIC", "Verdict", "hopeless", "in_words", "judge", "write_down"]

ERROR_CLASS, DETAIL = "error_class", "detail"
"""What a chooser says of a trial that failed or was pruned, in the trial's user attributes."""

METRIC = "metric"
"""The class of trials that ended well and logged nothing to judge them by."""
DIVERGED = "diverged"
BUDGET = "budget"
"""Of trials that were ended because the sweep may cost no more: they could go on."""

MOST_INTERRUPTIONS = 3
"""A trial whose supervisor is killed again and again in one allocation is not worth it (memory, most often)."""
FIRST_WITHOUT_METRIC = 3
FIRST_FAILED = 5
"""So many trials, if they are the first and have all failed alike, end a sweep."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a trial. ``left``: nothing, it is to be continued, later or by others."""

    state: Literal["complete", "pruned", "failed", "again", "left"]
    values: tuple[float, ...] = ()
    why: str = ""
    error_class: str | None = None


def judge(
    ended: Ended,
    *,
    values: Sequence[float] | None,
    never_logged: str,
    asked: str,
    over_budget: bool,
    failures: int,
    interruptions: int,
    retries: int,
    stopping: bool,
) -> Verdict:
    """What becomes of a trial, of all that was seen of it.

    Args:
        values: the last value of each metric, None where one has not come.
        never_logged: what to say then.
        asked: why the chooser had asked it to end, if it had.
        over_budget: that was because the sweep may cost no more.
        failures: how often the trial has failed, this time counted.
        interruptions: how often it has left in this allocation so as to be continued, this time counted.
        stopping: the host is giving the allocation up.
    """
    if ended.reason == "pruned":
        return Verdict(state="pruned", why=asked or ended.detail, error_class=BUDGET if over_budget else None)
    if ended.reason == "completed":
        return _completed(values, never_logged)
    if stopping or ended.error_class in ("busy", "disk") or ended.decision == "pause":
        return Verdict(state="left", why=ended.detail)
    if ended.decision != "end":
        # Where it concerns more than this trial, the host's next word is that it stops.
        return _interrupted(ended, interruptions)
    if ended.reason == "cancelled":
        return Verdict(state="failed", why="somebody has cancelled it", error_class="cancelled")
    why = ended.detail or ended.reason
    if failures <= retries:
        return Verdict(state="again", why=why, error_class=ended.error_class)
    return Verdict(state="failed", why=why, error_class=ended.error_class or ended.reason)


def _interrupted(ended: Ended, interruptions: int) -> Verdict:
    why = ended.detail or ended.reason
    if interruptions <= MOST_INTERRUPTIONS:
        return Verdict(state="again", why=why)
    return Verdict(state="failed", why=f"{why} ({interruptions} times)", error_class=ended.error_class or ended.reason)


def _completed(values: Sequence[float] | None, never_logged: str) -> Verdict:
    if values is None:
        return Verdict(state="failed", why=never_logged, error_class=METRIC)
    if not all(map(math.isfinite, values)):
        # As in Optuna, where a trial that returns NaN has failed: once more would only give the same.
        shown = ", ".join(f"{value:g}" for value in values)
        return Verdict(state="failed", why=f"the last value is no finite number: {shown}", error_class=DIVERGED)
    return Verdict(state="complete", values=tuple(values))


def write_down(
    study: SweepStudy,
    number: int,
    verdict: Verdict,
    marks: Mapping[str, object],
    *,
    last: tuple[int, float] | None = None,
) -> None:
    """Tell the study how a trial has ended.

    Args:
        marks: what else is to be noted of it.
        last: the last step of the first metric, and its value.
    """
    reasons = {ERROR_CLASS: verdict.error_class, DETAIL: verdict.why or None}
    study.mark(number, {name: value for name, value in {**marks, **reasons}.items() if value is not None})
    if verdict.state == "complete":
        study.complete(number, verdict.values)
    elif verdict.state == "pruned":
        study.prune(number, last=last)
    else:
        study.fail(number)


def in_words(verdict: Verdict, trials: Sequence[TrialRecord], goal: Goal) -> str:
    """What has become of a trial, and where that leaves the sweep."""
    words: str = verdict.state
    if verdict.state == "complete":
        words += f", {_values(goal, verdict.values)}"
    elif verdict.state == "failed":
        words += f", {verdict.why}"
    leader = best(trials, goal)
    if leader is not None:
        words += f"; best so far: trial {leader.trial.number}, {_values(goal, leader.values)}"
    return words


def _values(goal: Goal, values: Sequence[float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in zip(goal.metrics, values, strict=True))


def hopeless(trials: Sequence[TrialRecord], *, since: float = 0.0) -> str:
    """Why no other trial should begin; empty where there is hope.

    Args:
        since: failures from before this moment are forgiven (seconds since the epoch): somebody has looked into them.

    That is so when the first trials that have ended all failed in the same way: whoever comes next would as well. What
    one trial does never ends a sweep otherwise.
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
    mend = ". Log it, or start a sweep with another sweep.metric" if found == METRIC else ""
    return f"the first {len(ended)} trials all failed ({found}): {ended[0].user_attrs.get(DETAIL, '')}{mend}"


def _counts(trial: TrialRecord) -> bool:
    by_hand = trial.user_attrs.get(ERROR_CLASS) == "cancelled"
    return trial.is_finished and not by_hand and not is_surplus(trial.user_attrs)
