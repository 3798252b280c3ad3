"""Points of a sweep's space: a value for each parameter that applies. Which there are, and in which order.

A point is a mapping of parameters, as the file names them, to values. Parameters stand so that those of a condition
come before what depends on them; the first varies slowest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from hpcaccel.spec.parameters import Parameter, same

__all__ = [
    "Steps",
    "applies",
    "contains",
    "count",
    "equal",
    "in_order",
    "index_of",
    "point_of",
    "points",
    "stored_choices",
    "values",
]

Point = dict[str, Any]


class Steps(Sequence[float]):
    """``low``, ``low + step`` … ``high``, each as its decimal digits say (0.3, not 0.30000000000000004)."""

    def __init__(self, low: float, high: float, step: float) -> None:
        self.low, self.step = Decimal(str(low)), Decimal(str(step))
        self.length = int((Decimal(str(high)) - self.low) / self.step) + 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[item] for item in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return float(self.low + self.step * (index % self.length))


def values(parameter: Parameter) -> Sequence[Any] | None:
    """All values of a parameter, None where every number of a range is one."""
    if parameter.choice is not None:
        return parameter.choice
    low, high = parameter.range()
    if parameter.kind == "int":
        return range(low, high + 1, int(parameter.step or 1))
    return None if parameter.step is None else Steps(low, high, parameter.step)


def stored_choices(parameter: Parameter) -> list[bool | int | float | str | None]:
    """The choices as they stand in the journal: as they are, or as JSON where some are no scalars or not told apart."""
    assert parameter.choice is not None
    choices = parameter.choice
    scalar = all(choice is None or isinstance(choice, bool | int | float | str) for choice in choices)
    if scalar and len(set(choices)) == len(choices):
        return list(choices)
    return [json.dumps(choice, ensure_ascii=False) for choice in choices]


def point_of(parameters: Mapping[str, Parameter], stored: Mapping[str, Any]) -> Point:
    """The point that the journal has in this form, in the order of the parameters."""
    point: Point = {}
    for name, parameter in parameters.items():
        if name not in stored:
            continue
        value = stored[name]
        if parameter.choice is not None:
            value = parameter.choice[stored_choices(parameter).index(value)]
        point[name] = value
    return point


def index_of(parameter: Parameter, value: Any) -> int | None:
    """The place of ``value`` among the values of a parameter that has finitely many; None where it is not one."""
    if parameter.choice is not None:
        return next((index for index, choice in enumerate(parameter.choice) if same(choice, value)), None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    every = values(parameter)
    assert every is not None
    low, step = every[0], parameter.step or 1
    index = round((value - low) / step)
    there = 0 <= index < len(every) and math.isclose(every[index], value, rel_tol=1e-9, abs_tol=1e-9 * step)
    return index if there else None


def contains(parameter: Parameter, value: Any) -> bool:
    """Whether ``value`` is one of the parameter's."""
    if values(parameter) is not None:
        return index_of(parameter, value) is not None
    low, high = parameter.range()
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def applies(parameter: Parameter, point: Mapping[str, Any]) -> bool:
    """Whether a parameter applies where its others have the values in ``point``."""
    return all(
        name in point and any(same(point[name], value) for value in allowed) for name, allowed in parameter.when.items()
    )


def in_order(parameters: Mapping[str, Parameter]) -> tuple[dict[str, Parameter], list[str]]:
    """The parameters, each behind those that its conditions name, otherwise as they stand; and those in a circle."""
    waiting, ordered = dict(parameters), dict[str, Parameter]()
    while waiting:
        ready = next((name for name, item in waiting.items() if not item.when.keys() & waiting.keys()), None)
        if ready is None:
            return ordered, list(waiting)
        ordered[ready] = waiting.pop(ready)
    return ordered, []


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two points are the same one."""
    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def points(parameters: Mapping[str, Parameter]) -> Iterator[Point]:
    """Every point; ``parameters`` are in order and have finitely many values."""
    return _from(list(parameters.items()), 0, {})


def _from(parameters: list[tuple[str, Parameter]], first: int, chosen: Point) -> Iterator[Point]:
    if first == len(parameters):
        yield dict(chosen)
        return
    name, parameter = parameters[first]
    if not applies(parameter, chosen):
        yield from _from(parameters, first + 1, chosen)
        return
    every = values(parameter)
    assert every is not None, f"{name} has no end of values"
    for value in every:
        yield from _from(parameters, first + 1, {**chosen, name: value})


def count(parameters: Mapping[str, Parameter]) -> int | None:
    """The number of points, None where there is no end of them. Conditions on parameters are walked through."""
    if any(values(parameter) is None for parameter in parameters.values()):
        return None
    named = {name for parameter in parameters.values() for name in parameter.when}
    return _count(list(parameters.items()), 0, {}, named)


def _count(parameters: list[tuple[str, Parameter]], first: int, chosen: Point, named: set[str]) -> int:
    if first == len(parameters):
        return 1
    name, parameter = parameters[first]
    if not applies(parameter, chosen):
        return _count(parameters, first + 1, chosen, named)
    every = values(parameter)
    assert every is not None
    if name not in named:
        return len(every) * _count(parameters, first + 1, chosen, named)
    return sum(_count(parameters, first + 1, {**chosen, name: value}, named) for value in every)
