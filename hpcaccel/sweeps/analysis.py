"""Data for the plots of a sweep: metric curves, trials per rung, and the importance of each parameter."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_notes import STEPS
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.pruning import Rule, rule_of

__all__ = ["FEWEST", "Importances", "Rung", "curve", "importances", "rungs"]

MOST_POINTS = 300
"""Curves with more points are thinned: a plot cannot show more."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A step at which trials were compared."""

    step: int
    reached: int
    """Number of trials that reached this step."""
    ended: int
    """Number of pruned trials for which this was the last rung."""


def curve(sweep: SweepDir, trial: TrialRecord, metric: str) -> list[tuple[int, float]]:
    """The values of ``metric`` that a trial logged, each with its step. A long curve is thinned to a few hundred
    points."""
    lines = Logged(sweep.trial(trial.number)).read()
    found = {line.step: line.values[metric] for line in lines if metric in line.values}
    points = sorted(found.items())
    if len(points) <= MOST_POINTS:
        return points
    every = -(-len(points) // MOST_POINTS)
    return [*points[:-1:every], points[-1]]


def rungs(sweep: SweepDir, trials: Sequence[TrialRecord]) -> list[Rung]:
    """The rungs that were reached, in order; empty without a pruner."""
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
    last = max(trial.step or 0, done or 0)  # if a program logs fast, not every rung is in the journal
    return list(itertools.takewhile(lambda step: step <= last, rule.rungs(trial.number)))


FEWEST = 6
"""Minimum number of trials to compare; with fewer, the importances would be random."""


@dataclass(frozen=True, kw_only=True)
class Importances:
    """Each parameter's share of the differences between trials, largest first; empty if too few
    trials have a value, or if all values are equal."""

    shares: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    """The step at which the trials were compared; None if they were compared at their end."""


def importances(sweep: SweepDir, trials: Sequence[TrialRecord], rungs: Sequence[Rung]) -> Importances:
    """The importance of each parameter, computed from the trials' final values or, if most trials were pruned, from
    their values at the last rung that at least half of them reached.

    The method is Optuna's PED-ANOVA (Watanabe et al., "PED-ANOVA", IJCAI 2023), which needs no package besides Optuna.
    With several metrics, the first one is used.
    """
    begun = [trial for trial in trials if trial.state in ("complete", "pruned")]
    step = None
    values = {trial.number: trial.values[0] for trial in begun if trial.state == "complete" and trial.values}
    if 2 * len(values) < len(begun):
        step = max((rung.step for rung in rungs if 2 * rung.reached >= len(begun)), default=None)
        if step is not None:
            values = {trial.number: value for trial in begun if (value := _at(trial, step)) is not None}
    values = {number: value for number, value in values.items() if math.isfinite(value)}
    if len(values) < FEWEST or len(set(values.values())) < 2:
        return Importances()
    compared = [trial for trial in begun if trial.number in values]
    return Importances(shares=_evaluated(sweep, compared, values), step=step)


def _at(trial: TrialRecord, rung: int) -> float | None:
    """The trial's first value at or after a rung; None if there is no such value."""
    steps = [step for step in trial.intermediate if step >= rung]
    return trial.intermediate[min(steps)] if steps else None


def _evaluated(sweep: SweepDir, trials: Sequence[TrialRecord], values: Mapping[int, float]) -> dict[str, float]:
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from hpcaccel.sweeps.space import Space

    spec = read_definition(sweep).spec
    distributions = Space(spec.sweep.parameters).distributions
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize" if spec.sweep.modes[0] == "min" else "maximize")
    for trial in trials:
        known = {name: distributions[name] for name in trial.params}
        study.add_trial(optuna.trial.create_trial(params=trial.params, distributions=known, value=values[trial.number]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)  # about values that occur in few trials
        return dict(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
