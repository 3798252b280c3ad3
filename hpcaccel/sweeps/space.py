"""The search space in Optuna: a distribution for each parameter, and the conversion of points in both directions.

Optuna stores numbers, text, booleans and null. If a parameter has choices of other types, or choices that are equal in
Python (1 and true), all of its choices are stored as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial

from hpcaccel.spec.sweep.parameters import Parameter
from hpcaccel.spec.sweep.points import applies, count, index_of, point_of, stored_choices, values

__all__ = ["Point", "Space"]

Point = dict[str, Any]
"""A point of the search space: values as in the job spec, by parameter name as in the sweep file."""


class Space:
    """The search space of a sweep.

    Args:
        parameters: the sweep's parameters, each after the parameters that its condition refers to.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self.distributions = {name: _distribution(parameter) for name, parameter in self.parameters.items()}
        self.count = count(self.parameters)
        """Number of points; None if infinite."""

    @property
    def conditional(self) -> bool:
        """Whether some parameters have conditions."""
        return any(parameter.when for parameter in self.parameters.values())

    def stored(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a complete or partial point as Optuna stores them."""
        return {name: self._stored(name, value) for name, value in point.items()}

    def _stored(self, name: str, value: Any) -> Any:
        parameter = self.parameters[name]
        if parameter.choice is None:
            return value
        index = index_of(parameter, value)
        assert index is not None, f"{value!r} is not a choice of {name}"
        return stored_choices(parameter)[index]

    def point(self, stored: Mapping[str, Any]) -> Point:
        """The point whose values Optuna stores as ``stored``; the point may be partial."""
        return point_of(self.parameters, stored)

    def is_whole(self, point: Mapping[str, Any]) -> bool:
        """Whether ``point`` has a value for every parameter that applies."""
        return all(name in point or not applies(parameter, point) for name, parameter in self.parameters.items())

    def near(self, name: str, value: Any) -> Any:
        """``value`` without rounding errors: as the parameter lists it or, in a continuous range, as a float."""
        parameter = self.parameters[name]
        every = values(parameter)
        if every is None:
            return float(value)
        index = index_of(parameter, value)
        assert index is not None, f"{value!r} is not a value of {name}"
        return every[index]

    def suggest(self, trial: BaseTrial) -> Point:
        """Choose a value for each parameter of a trial in turn, leaving out parameters whose conditions do not hold.

        Values that the trial already has, or that are fixed for it, are kept.
        """
        chosen: Point = {}
        for name, parameter in self.parameters.items():
            if applies(parameter, chosen):
                chosen |= self.point({name: _suggested(trial, name, self.distributions[name])})
        return chosen

    def at(self, unit: Sequence[float], fixed: Mapping[str, Any]) -> Point:
        """The point at a position of the unit cube, with a coordinate in [0, 1) for each parameter.

        Args:
            fixed: predetermined values, by parameter.
        """
        chosen: Point = {}
        for (name, parameter), coordinate in zip(self.parameters.items(), unit, strict=True):
            if applies(parameter, chosen):
                chosen[name] = fixed[name] if name in fixed else _at(parameter, coordinate)
        return chosen

    def value_at(self, name: str, coordinate: float) -> Any:
        """The value of one parameter at a coordinate in [0, 1)."""
        return _at(self.parameters[name], coordinate)


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.choice is not None:
        return CategoricalDistribution(stored_choices(parameter))
    low, high = parameter.range()
    if parameter.kind == "int":
        return IntDistribution(low, high, log=parameter.log, step=int(parameter.step or 1))
    return FloatDistribution(low, high, log=parameter.log, step=parameter.step)


def _suggested(trial: BaseTrial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(
            name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _at(parameter: Parameter, coordinate: float) -> Any:
    every = values(parameter)
    if every is not None and not parameter.log:
        return every[int(coordinate * len(every))]
    low, high = parameter.range()
    if parameter.kind == "int":  # each integer covers the numbers that round to it
        return min(max(round(_between(low - 0.5, high + 0.5, coordinate, log=True)), low), high)
    return min(max(_between(low, high, coordinate, log=parameter.log), low), high)


def _between(low: float, high: float, coordinate: float, *, log: bool) -> float:
    if log:
        return math.exp(_between(math.log(low), math.log(high), coordinate, log=False))
    return low + coordinate * (high - low)
