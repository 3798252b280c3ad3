"""A sweep's space as Optuna knows it: a distribution for each parameter, and points that go there and back.

Optuna keeps numbers, text, booleans and null; a choice that is none of these is kept as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial

from hpcaccel.spec.parameters import Parameter
from hpcaccel.spec.points import applies, count, index_of, point_of, stored_choices, values

__all__ = ["Point", "Space"]

Point = dict[str, Any]
"""Parameters, as the file names them, to values, as the job spec takes them."""


class Space:
    """All points of a sweep.

    Args:
        parameters: of the sweep, in the order of their conditions.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self.distributions = {name: _distribution(parameter) for name, parameter in self.parameters.items()}
        self.count = count(self.parameters)
        """The number of points; None: without end."""

    @property
    def conditional(self) -> bool:
        """Whether some parameters do not apply everywhere."""
        return any(parameter.when for parameter in self.parameters.values())

    def stored(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a point, whole or not, as Optuna keeps them."""
        return {name: self._stored(name, value) for name, value in point.items()}

    def _stored(self, name: str, value: Any) -> Any:
        parameter = self.parameters[name]
        if parameter.choice is None:
            return value
        index = index_of(parameter, value)
        assert index is not None, f"{value!r} is no choice of {name}"
        return stored_choices(parameter)[index]

    def point(self, stored: Mapping[str, Any]) -> Point:
        """The point whose values Optuna keeps so, as far as there are any."""
        return point_of(self.parameters, stored)

    def is_whole(self, point: Mapping[str, Any]) -> bool:
        """Whether every parameter that applies has a value."""
        return all(name in point or not applies(parameter, point) for name, parameter in self.parameters.items())

    def near(self, name: str, value: Any) -> Any:
        """The value of a parameter that finitely many values leave, for one that is so but for rounding."""
        parameter = self.parameters[name]
        every = values(parameter)
        if every is None:
            return float(value)
        index = index_of(parameter, value)
        assert index is not None, f"{value!r} is no value of {name}"
        return every[index]

    def suggest(self, trial: BaseTrial) -> Point:
        """Let a trial choose, parameter by parameter, those that apply after the choices before.

        Values that the trial has already, or that are fixed for it, stay.
        """
        chosen: Point = {}
        for name, parameter in self.parameters.items():
            if applies(parameter, chosen):
                chosen |= self.point({name: _suggested(trial, name, self.distributions[name])})
        return chosen

    def at(self, unit: Sequence[float], fixed: Mapping[str, Any]) -> Point:
        """The point at some place of the unit cube, one coordinate a parameter, each at least 0 and below 1.

        Args:
            fixed: values that stand already.
        """
        chosen: Point = {}
        for (name, parameter), coordinate in zip(self.parameters.items(), unit, strict=True):
            if applies(parameter, chosen):
                chosen[name] = fixed[name] if name in fixed else _at(parameter, coordinate)
        return chosen

    def value_at(self, name: str, coordinate: float) -> Any:
        """The value of one parameter at a coordinate of at least 0 and below 1."""
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
    if parameter.kind == "int":  # each whole number with what is nearer to it than to any other
        return min(max(round(_between(low - 0.5, high + 0.5, coordinate, log=True)), low), high)
    return min(max(_between(low, high, coordinate, log=parameter.log), low), high)


def _between(low: float, high: float, coordinate: float, *, log: bool) -> float:
    if log:
        return math.exp(_between(math.log(low), math.log(high), coordinate, log=False))
    return low + coordinate * (high - low)
