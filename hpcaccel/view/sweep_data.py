"""What the drawings of a sweep show, and their colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.sweeps.curves import Rung
from hpcaccel.sweeps.importances import Importances
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal

__all__ = ["BAD", "BEST", "DIM", "GOOD", "INK", "SweepData", "shown"]

GOOD, DIM, BAD, BEST, INK = "#2a6fbb", "#b9c0c8", "#c8553d", "#e08e0b", "#2f3640"
"""Complete, pruned, failed, the best one, and what is written: colours that colour-blind people tell apart."""


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """What is drawn."""

    goal: Goal
    trials: Sequence[TrialRecord]
    best: TrialRecord | None
    curves: Mapping[int, Sequence[tuple[int, float]]]
    """The first metric by step, of each trial that has a curve."""
    importances: Importances
    rungs: Sequence[Rung]
    log_parameters: frozenset[str] = frozenset()
    """Those that are searched on a logarithmic scale."""
    lines: frozenset[int] = frozenset()
    """The trials that get a line of their own; of a large sweep the best ones, and others at equal distances."""
    points: list[Sequence[TrialRecord]] = field(default_factory=list)
    """What was drawn as points: see ``sweep_hover``."""

    @property
    def metric(self) -> str:
        return self.goal.metrics[0]

    def with_value(self, *states: str) -> list[TrialRecord]:
        """Trials in one of these states that have a finite first value."""
        return [
            trial
            for trial in self.trials
            if trial.state in states and trial.values and all(map(math.isfinite, trial.values))
        ]


def shown(value: Any) -> str:
    """A value at an axis."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
