"""What trials logged on their way, for drawings: their metric by step, and how many came to each rung."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import SweepDir
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.pruning import Rule, rule_of
from hpcaccel.sweeps.results import STEPS

__all__ = ["Rung", "curve", "rungs"]

MOST_POINTS = 300
"""Of a curve: a drawing has no more room."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A step at which trials were compared."""

    step: int
    reached: int
    """How many trials came so far."""
    ended: int
    """How many of them were ended here."""


def curve(sweep: SweepDir, trial: TrialRecord, metric: str) -> list[tuple[int, float]]:
    """Step and value of everything that a trial logged of ``metric``; of a long one some hundred points."""
    lines = Logged(sweep.trial(trial.number)).read()
    found = {line.step: line.values[metric] for line in lines if metric in line.values}
    points = sorted(found.items())
    if len(points) <= MOST_POINTS:
        return points
    every = -(-len(points) // MOST_POINTS)
    return [*points[:-1:every], points[-1]]


def rungs(sweep: SweepDir, trials: Sequence[TrialRecord]) -> list[Rung]:
    """The rungs that were reached, the first one first; empty without a pruner."""
    rule = rule_of(read_definition(sweep).spec.sweep)
    if rule is None:
        return []
    reached: dict[int, int] = {}
    ended: dict[int, int] = {}
    for trial in trials:
        passed = _passed(rule, trial)
        for step in passed:
            reached[step] = reached.get(step, 0) + 1
        if trial.state == "pruned" and passed:
            ended[passed[-1]] = ended.get(passed[-1], 0) + 1
    return [Rung(step=step, reached=reached[step], ended=ended.get(step, 0)) for step in sorted(reached)]


def _passed(rule: Rule, trial: TrialRecord) -> list[int]:
    done = trial.user_attrs.get(STEPS) if trial.state == "complete" else None
    last = max(trial.step or 0, done or 0)  # not every rung is written down where a program logs faster than we look
    return list(itertools.takewhile(lambda step: step <= last, rule.rungs(trial.number)))
