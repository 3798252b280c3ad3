"""Sampler for all search methods: draws the next point.

A point does not depend on the worker that draws it. A trial's index is the number of trials drawn before it in the
journal, whose order is the same for all workers. The first indices get the spec's own point and the enqueued points,
later indices the next points of the grid, the Sobol sequence and so on. Workers that draw at the same time therefore
use different indices, and a worker that replaces a dead one reuses the dead one's index. TPE, GP and CMA-ES also
depend on the results so far. No method's state is stored, except for the attributes that Optuna's samplers write to
their trials.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from hpcaccel.spec.sweep.parameters import same
from hpcaccel.spec.sweep.points import applies, contains, equal, own_point, points
from hpcaccel.spec.sweep.sweep_fields import SweepSpec
from hpcaccel.sweeps.definition import check_packages
from hpcaccel.sweeps.journal_notes import is_drawn, is_surplus, point_number
from hpcaccel.sweeps.space import Point, Space

__all__ = ["SpaceExhausted", "TrialSampler", "rank"]

MAX_LISTED = 10_000
"""In a space with at most this many points, ``random`` draws from a shuffled list of all points, and no method draws a
point twice."""


class SpaceExhausted(Exception):
    """Every point of the space has been drawn."""


def rank(trials: Sequence[FrozenTrial], number: int) -> int:
    """Number of trials drawn before trial ``number``."""
    return sum(trial.number < number and is_drawn(trial.user_attrs) for trial in trials)


class TrialSampler(BaseSampler):
    """Optuna sampler for all search methods; it samples the whole point at once."""

    def __init__(self, spec: SweepSpec) -> None:
        check_packages(spec.sweep.method)
        self.sweep = spec.sweep
        self.space = Space(spec.sweep.parameters)
        self.listed = self.space.count is not None and self.space.count <= MAX_LISTED
        self.first = _first_points(spec, self.space)
        """The spec's own point and the enqueued points; some may be partial."""
        self._plan: Iterator[Point] | None = None
        self._planned: list[Point] = []
        if self.sweep.method == "grid" or (self.sweep.method == "random" and self.listed):
            self._plan = self._in_turn()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The point of a new trial, as Optuna stores it.

        Raises:
            SpaceExhausted: there is no point left.
        """
        trials = study.get_trials(deepcopy=False)
        place = rank(trials, point_number(trial.number, trial.user_attrs))
        point = self._draw(study, trial, place, trials)
        return self.space.stored(point)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Sample a parameter that applies but is missing from the drawn point. This happens in enqueued trials, whose
        own values satisfy the parameter's condition."""
        source = random.Random(f"{self._seed(trial.number)}:{param_name}")
        return self.space.stored({param_name: self.space.value_at(param_name, source.random())})[param_name]

    def _draw(self, study: Study, trial: FrozenTrial, place: int, trials: Sequence[FrozenTrial]) -> Point:
        if self._plan is not None:
            self._planned += itertools.islice(self._plan, max(0, place + 1 - len(self._planned)))
            if place >= len(self._planned):
                raise SpaceExhausted
            return self._planned[place]
        fixed = self.first[place] if place < len(self.first) else {}
        point = self._proposed(study, trial, place, fixed)
        if not self.listed:
            return point
        taken = [self.space.point(other.params) for other in trials if self._counts(other, trial)]
        if not any(equal(point, other) for other in taken):
            return point
        return self._free(taken, fixed, trial.number)

    def _counts(self, other: FrozenTrial, trial: FrozenTrial) -> bool:
        return other.number != trial.number and bool(other.params) and not is_surplus(other.user_attrs)

    def _free(self, taken: Sequence[Point], fixed: Mapping[str, Any], number: int) -> Point:
        free = [point for point in points(self.space.parameters) if not any(equal(point, other) for other in taken)]
        if not free:
            raise SpaceExhausted
        fitting = [point for point in free if _agrees(point, fixed)]
        return random.Random(self._seed(number)).choice(fitting or free)

    def _proposed(self, study: Study, trial: FrozenTrial, place: int, fixed: Point) -> Point:
        if self.space.is_whole(fixed):
            return fixed
        if self.sweep.method == "random":
            source = random.Random(self._seed(place))
            return self.space.at([source.random() for _ in self.space.parameters], fixed)
        if self.sweep.method == "qmc":
            return self.space.at(_sobol(len(self.space.parameters), self.sweep.seed, place), fixed)
        return self._of_optuna(study, trial, fixed)

    def _of_optuna(self, study: Study, trial: FrozenTrial, fixed: Point) -> Point:
        base = self._base(trial.number)
        known = base.infer_relative_search_space(study, trial)
        space = {name: item for name, item in known.items() if name not in fixed}
        together = base.sample_relative(study, trial, space)
        chosen: Point = {}
        for name, parameter in self.space.parameters.items():
            if not applies(parameter, chosen):
                continue
            if name in fixed:
                chosen[name] = fixed[name]
                continue
            distribution = self.space.distributions[name]
            if name in together:
                value = together[name]
            elif distribution.single():
                value = distribution.to_external_repr(distribution.to_internal_repr(self._only(name)))
            else:
                value = base.sample_independent(study, trial, name, distribution)
            chosen[name] = self.space.near(name, self.space.point({name: value})[name])
        return chosen

    def _only(self, name: str) -> Any:
        choices = self.space.parameters[name].choice
        assert choices is not None  # ranges have two values or more
        return self.space.stored({name: choices[0]})[name]

    def _base(self, number: int) -> BaseSampler:
        """A new Optuna sampler for each trial, so that the result does not depend on earlier draws."""
        seed = self._seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            if self.sweep.method == "gp":
                return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
            if self.sweep.method == "cmaes":
                return optuna.samplers.CmaEsSampler(
                    seed=seed,
                    warn_independent_sampling=False,
                    consider_pruned_trials=self.sweep.pruner.rule is not None,
                )
            return optuna.samplers.TPESampler(
                seed=seed,
                multivariate=True if len(self.sweep.metrics) == 1 or self.space.conditional else None,
                group=self.space.conditional,
                constant_liar=True,
            )

    def _seed(self, number: int) -> int:
        digest = hashlib.sha256(f"{self.sweep.seed}:{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def _in_turn(self) -> Iterator[Point]:
        """All points: first a point that matches each entry of ``self.first``, then the rest (in order for ``grid``,
        else shuffled)."""
        early: list[Point] = []
        for wanted in filter(None, self.first):
            found = next((point for point in self._all() if _agrees(point, wanted) and point not in early), None)
            early += [] if found is None else [found]
        yield from early
        rest = (point for point in self._all() if not any(equal(point, other) for other in early))
        if self.sweep.method == "grid":
            yield from rest
        else:
            shuffled = list(rest)
            random.Random(self.sweep.seed).shuffle(shuffled)
            yield from shuffled

    def _all(self) -> Iterator[Point]:
        return points(self.space.parameters)


def _first_points(spec: SweepSpec, space: Space) -> list[Point]:
    """The spec's own values and the enqueued points, without duplicates and without values outside the space."""
    found: list[Point] = []
    for point in [own_point(spec), *spec.sweep.enqueue]:
        fits = {name: value for name, value in point.items() if contains(space.parameters[name], value)}
        if not any(equal(fits, other) for other in found):
            found.append(fits)
    return found


def _agrees(point: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(name in point and same(point[name], value) for name, value in wanted.items())


def _sobol(dimensions: int, seed: int, place: int) -> list[float]:
    """One point of a scrambled Sobol sequence (Sobol 1967, scrambled as in Owen 1998)."""
    from scipy.stats import qmc

    engine = qmc.Sobol(dimensions, scramble=True, seed=seed)
    if place:
        engine.fast_forward(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a single point is not balanced
        return [float(item) for item in engine.random(1)[0]]
