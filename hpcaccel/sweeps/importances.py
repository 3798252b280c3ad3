"""How much of the difference between trials each parameter accounts for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Literal

from hpcaccel.rundir import SweepDir
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.reading import TrialRecord

__all__ = ["FEWEST", "importances"]

FEWEST = 6
"""With fewer finished trials any answer would be chance."""


def importances(sweep: SweepDir, trials: list[TrialRecord]) -> Mapping[str, float]:
    """The share of each parameter in what makes trials good, largest first; empty where too little is known.

    PED-ANOVA (Watanabe et al., "PED-ANOVA", IJCAI 2023), which Optuna has and which needs no other package. Of several
    metrics the first one counts; parameters that not every trial has are left out.
    """
    finished = [trial for trial in trials if trial.state == "complete" and trial.values]
    finished = [trial for trial in finished if math.isfinite(trial.values[0])]  # type: ignore[index]
    if len(finished) < FEWEST or len({trial.values[0] for trial in finished if trial.values}) < 2:
        return {}
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from hpcaccel.sweeps.space import Space

    spec = read_definition(sweep).spec
    distributions = Space(spec.sweep.parameters).distributions
    direction: Literal["minimize", "maximize"] = "minimize" if spec.sweep.modes[0] == "min" else "maximize"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction)
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=trial.params,
                distributions={name: distributions[name] for name in trial.params},
                value=trial.values[0] if trial.values else None,
            )
            for trial in finished
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return dict(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
