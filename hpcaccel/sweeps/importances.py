"""How much of the difference between trials each parameter accounts for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.sweeps.curves import Rung
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_reader import TrialRecord

__all__ = ["FEWEST", "Importances", "importances"]

FEWEST = 6
"""With fewer trials any answer would be chance."""


@dataclass(frozen=True, kw_only=True)
class Importances:
    """The share of each parameter in what makes trials good, largest first; empty where too little is known."""

    shares: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    """Where trials were compared; None: at their end."""


def importances(sweep: SweepDir, trials: Sequence[TrialRecord], rungs: Sequence[Rung]) -> Importances:
    """Compare trials at their end, or, where most were ended early, at the last rung that half of them came to.

    PED-ANOVA (Watanabe et al., "PED-ANOVA", IJCAI 2023), which Optuna has and which needs no other package. Of several
    metrics the first one counts.
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
    """The first value at or behind a rung."""
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
        warnings.simplefilter("ignore", UserWarning)  # of values that few trials had: what is drawn is a hint
        return dict(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
