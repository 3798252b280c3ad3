"""Pruning rules: compare trials at rungs and stop the worse ones.

A trial is compared when it first logs its metric at or after a rung, a step known in advance, so that few values are
written to the journal. The rule is applied to all values known at that moment, without waiting for other trials: a
trial continues at once or is stopped for good.

ASHA (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020) is implemented in its stopping
variant, as in Ray Tune and Syne Tune. This variant needs no paused trials.
"""

from __future__ import annotations

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpcaccel.spec.sweep.pruners import Asha, Hyperband, Median
from hpcaccel.spec.sweep.sweep_fields import SweepSection

__all__ = ["Curve", "Rule", "rule_of"]

DECIDING_RUNGS = 2
"""Number of rungs at which ASHA stops trials if the spec does not set the first rung. With factor 4 they are at 1/16
and 1/4 of a trial's steps, or later. Before that, during warm-up or with a large learning rate, the metric hardly
predicts the final value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The reported values of one trial's metric; lookups are cached."""

    number: int
    values: Mapping[int, float]
    """The reported values of the metric, by step."""
    complete: bool = False
    """Whether the trial is complete."""
    _at: dict[int, float | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def step(self) -> int:
        """The last reported step; 0 if no step has been reported."""
        return max(self.values, default=0)

    def at(self, rung: int) -> float | None:
        """The first value at or after a rung; None if the trial has not reached it."""
        if rung not in self._at:
            step = min((step for step in self.values if step >= rung), default=None)
            self._at[rung] = None if step is None else self.values[step]
        return self._at[rung]


class Rule(ABC):
    """Decides at rungs which trials are stopped.

    Args:
        mode: ``min`` if smaller values are better, ``max`` if larger values are better.
    """

    def __init__(self, mode: str) -> None:
        self._sign = 1.0 if mode == "min" else -1.0

    @abstractmethod
    def rungs(self, number: int) -> Iterator[int]:
        """The rungs of trial ``number``, in ascending order; there may be infinitely many."""

    @abstractmethod
    def verdict(self, trial: Curve, others: Sequence[Curve]) -> str:
        """Why the trial is stopped, as a message; empty if it continues.

        Args:
            trial: the trial, including its newest value.
            others: all other trials, in any state.
        """

    def wants(self, number: int, step: int, *, after: int = 0) -> bool:
        """Whether to report the value at ``step``, if the last reported value was at step ``after``."""
        for rung in self.rungs(number):
            if rung > step:
                return False
            if rung > after:
                return True
        return False

    def _last_rung(self, trial: Curve) -> int | None:
        """The highest rung that the trial has reached; None if it has reached none."""
        return max(itertools.takewhile(lambda rung: rung <= trial.step, self.rungs(trial.number)), default=None)

    def _cost(self, value: float) -> float:
        """The value, negated for ``max`` so that lower is better; NaN becomes infinity."""
        return math.inf if math.isnan(value) else self._sign * value


def rule_of(sweep: SweepSection) -> Rule | None:
    """A sweep's pruning rule; None if no trial is pruned."""
    settings = sweep.pruner.rule
    if isinstance(settings, Asha):
        return _Asha(settings, sweep.modes[0])
    if isinstance(settings, Hyperband):
        return _Hyperband(settings, sweep.modes[0])
    return _Median(settings, sweep.modes[0]) if isinstance(settings, Median) else None


class _Asha(Rule):
    def __init__(self, settings: Asha, mode: str) -> None:
        super().__init__(mode)
        self.factor = settings.reduction_factor
        self.last = settings.max_steps
        self.first = settings.min_steps
        if self.first is None and self.last is not None:
            self.first = _below(self.last, self.factor, DECIDING_RUNGS)

    def rungs(self, number: int) -> Iterator[int]:
        return _ladder(self.first or 1, self.factor, self.last)

    def verdict(self, trial: Curve, others: Sequence[Curve]) -> str:
        rung = self._last_rung(trial)
        if rung is None or (self.first is None and rung < self._deciding(others)):
            return ""
        return self._halved(trial, others, rung)

    def _halved(self, trial: Curve, others: Sequence[Curve], rung: int) -> str:
        own = trial.values[trial.step]
        if math.isnan(own):
            return f"its metric is NaN at step {trial.step}"
        costs = [self._cost(value) for other in others if (value := other.at(rung)) is not None]
        if len(costs) + 1 < self.factor:
            return ""
        mine = self._cost(own)
        better = sum(cost < mine for cost in costs)
        kept = (len(costs) + 1) // self.factor
        if better < kept:
            return ""
        best = "one continues" if kept == 1 else f"{kept} continue"
        return f"at step {rung} it was ranked {better + 1} of {len(costs) + 1}, and only the best {best}"

    def _deciding(self, others: Sequence[Curve]) -> float:
        """The lowest rung at which trials are stopped, computed from the longest complete trial; infinity if no trial
        is complete."""
        longest = max((other.step for other in others if other.complete), default=0)
        passed = list(itertools.takewhile(lambda rung: rung <= longest, self.rungs(0)))
        return passed[-DECIDING_RUNGS:][0] if passed else math.inf


class _Hyperband(_Asha):
    """ASHA in brackets, each of which starts one rung after the bracket before it and gets fewer trials: Li et al.,
    "Hyperband", JMLR 2018."""

    def __init__(self, settings: Hyperband, mode: str) -> None:
        first = settings.min_steps or _below(settings.max_steps, settings.reduction_factor, 3)
        super().__init__(
            Asha(min_steps=first, max_steps=settings.max_steps, reduction_factor=settings.reduction_factor), mode
        )
        self.starts = [*_ladder(first, self.factor, settings.max_steps), settings.max_steps]
        """The first rung of each bracket; trials of the last bracket are never stopped."""
        self.order = _dealt([self._share(bracket) for bracket in range(len(self.starts))])

    def _share(self, bracket: int) -> int:
        left = len(self.starts) - 1 - bracket
        return math.ceil(len(self.starts) * int(self.factor**left) / (left + 1))

    def bracket(self, number: int) -> int:
        """The bracket of a trial. In any range of trial numbers each bracket has nearly its share."""
        return self.order[number % len(self.order)]

    def rungs(self, number: int) -> Iterator[int]:
        return _ladder(self.starts[self.bracket(number)], self.factor, self.last)

    def verdict(self, trial: Curve, others: Sequence[Curve]) -> str:
        bracket = self.bracket(trial.number)
        return super().verdict(trial, [other for other in others if self.bracket(other.number) == bracket])


class _Median(Rule):
    def __init__(self, settings: Median, mode: str) -> None:
        super().__init__(mode)
        self.settings = settings

    def rungs(self, number: int) -> Iterator[int]:
        first = max(1, self.settings.warmup_steps)
        if self.settings.interval_steps is None:
            return _ladder(first, 2, None)
        return itertools.count(first, self.settings.interval_steps)

    def verdict(self, trial: Curve, others: Sequence[Curve]) -> str:
        rung = self._last_rung(trial)
        if rung is None:
            return ""
        if math.isnan(trial.values[trial.step]):
            return f"its metric is NaN at step {trial.step}"
        finished = [value for other in others if other.complete and (value := other.at(rung)) is not None]
        if len(finished) < self.settings.startup_trials:
            return ""
        middle = statistics.median(self._cost(value) for value in finished)
        best = min(self._cost(value) for value in trial.values.values())
        if best <= middle:
            return ""
        return (
            f"its best value up to step {rung} is {self._sign * best:.6g}, worse than the median of "
            f"{self._sign * middle:.6g}"
        )


def _ladder(first: int, factor: int, last: int | None) -> Iterator[int]:
    rung = first
    while last is None or rung < last:
        yield rung
        rung *= factor


def _below(steps: int, factor: int, rungs: int) -> int:
    """The lowest rung of a ladder that has ``rungs`` rungs below ``steps``."""
    return max(1, math.ceil(steps / int(factor**rungs)))


def _dealt(shares: Sequence[int]) -> list[int]:
    """The bracket of each trial in a round of ``sum(shares)`` trials, ordered so that at any time each bracket has
    nearly its share."""
    given = [0] * len(shares)
    order = []
    for _ in range(sum(shares)):
        bracket = min(range(len(shares)), key=lambda index: (given[index] + 1) / shares[index])
        given[bracket] += 1
        order.append(bracket)
    return order
