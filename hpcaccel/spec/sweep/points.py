"""Points of a sweep's search space, and the job spec of a trial: the sweep's job with the values of a point."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.loading.layers import Layer, put
from hpcaccel.spec.loading.overrides import setting_path
from hpcaccel.spec.loading.problems import describe, report
from hpcaccel.spec.sweep.parameters import Parameter, same
from hpcaccel.spec.sweep.sweep_fields import SweepSpec
from hpcaccel.spec.yaml12 import KeyPath

__all__ = [
    "MISSING",
    "Steps",
    "applies",
    "contains",
    "count",
    "equal",
    "in_order",
    "index_of",
    "layer_of",
    "notes",
    "own_point",
    "point_of",
    "points",
    "resolve",
    "seed_of",
    "stored_choices",
    "value_at",
    "values",
]


Point = dict[str, Any]


class Steps(Sequence[float]):
    """The sequence ``low``, ``low + step`` … ``high``, in decimal arithmetic (0.3, not 0.30000000000000004)."""

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
    """All values of a parameter, or None for a continuous range."""
    if parameter.choice is not None:
        return parameter.choice
    low, high = parameter.range()
    if parameter.kind == "int":
        return range(low, high + 1, int(parameter.step or 1))
    return None if parameter.step is None else Steps(low, high, parameter.step)


def stored_choices(parameter: Parameter) -> list[bool | int | float | str | None]:
    """Choices as the journal stores them: unchanged; or all as JSON, if a choice is not a scalar or if two choices are
    equal (1, True)."""
    assert parameter.choice is not None
    choices = parameter.choice
    scalar = all(choice is None or isinstance(choice, bool | int | float | str) for choice in choices)
    if scalar and len(set(choices)) == len(choices):
        return list(choices)
    return [json.dumps(choice, ensure_ascii=False) for choice in choices]


def point_of(parameters: Mapping[str, Parameter], stored: Mapping[str, Any]) -> Point:
    """The point for ``stored``, values as the journal stores them. The point has the order of the parameters."""
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
    """The index of ``value`` among a parameter's finitely many values; None if it is not one of these."""
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
    """Whether ``value`` is a value of the parameter."""
    if values(parameter) is not None:
        return index_of(parameter, value) is not None
    low, high = parameter.range()
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def applies(parameter: Parameter, point: Mapping[str, Any]) -> bool:
    """Whether the conditions of a parameter hold for the values in ``point``."""
    return all(
        name in point and any(same(point[name], value) for value in allowed) for name, allowed in parameter.when.items()
    )


def in_order(parameters: Mapping[str, Parameter]) -> tuple[dict[str, Parameter], list[str]]:
    """Sort the parameters so that each comes after those in its conditions. Otherwise their order is kept.

    Returns the sorted parameters, and the names that cannot be sorted because their conditions form a cycle.
    """
    waiting, ordered = dict(parameters), dict[str, Parameter]()
    while waiting:
        ready = next((name for name, item in waiting.items() if not item.when.keys() & waiting.keys()), None)
        if ready is None:
            return ordered, list(waiting)
        ordered[ready] = waiting.pop(ready)
    return ordered, []


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two points have the same parameters and values."""
    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def points(parameters: Mapping[str, Parameter]) -> Iterator[Point]:
    """Yield all points. ``parameters`` must be sorted by ``in_order``, and each must have finitely many values."""
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
    assert every is not None, f"{name} is continuous"
    for value in every:
        yield from _from(parameters, first + 1, {**chosen, name: value})


def count(parameters: Mapping[str, Parameter]) -> int | None:
    """The number of points that the conditions allow; None if a parameter has a continuous range."""
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


MISSING = object()
"""Returned by ``value_at`` for a path that is not set."""


def layer_of(job: JobSpec) -> Layer:
    """The settings of a spec with all defaults, as a layer for ``put``."""
    return Layer(job.model_dump(mode="json"))


def resolve(spec: SweepSpec, values: Mapping[str, Any], *, seed: int | None = None) -> JobSpec:
    """The job spec of a trial.

    Args:
        values: the point, as values by parameter name. The names are those in the file.
        seed: ``runtime.seed`` of the trial; None to keep the spec's own.

    Raises:
        SpecError: the spec with these values is not valid.
    """
    layer = layer_of(spec.job)
    settings: list[tuple[KeyPath, Any]] = [(setting_path(name, layer), value) for name, value in values.items()]
    if seed is not None:
        settings.append((("runtime", "seed"), seed))
    layer = put(layer, settings)
    try:
        job = JobSpec.model_validate(layer.values)
    except ValidationError as error:
        raise SpecError(report(describe(error, JobSpec, layer, "this point"))) from None
    job._source = spec.source
    return job


def seed_of(spec: SweepSpec, repeat: int) -> int | None:
    """``runtime.seed`` for repetition ``repeat`` (from 0) of a point; None if the trial keeps the spec's own seed.

    The seeds count up from the spec's ``runtime.seed``, or from ``sweep.seed`` if ``runtime.seed`` is not set.
    """
    if spec.sweep.repeat == 1:
        return None
    first = spec.job.runtime.seed
    return (spec.sweep.seed if first is None else first) + repeat


def own_point(spec: SweepSpec) -> dict[str, Any]:
    """The point of the spec's own values. Values outside the search space are left out."""
    layer = layer_of(spec.job)
    point: dict[str, Any] = {}
    for name, parameter in spec.sweep.parameters.items():
        value = value_at(layer, setting_path(name, layer))
        if value is not MISSING and applies(parameter, point) and contains(parameter, value):
            point[name] = _of_kind(parameter, value)
    return point


def _of_kind(parameter: Parameter, value: Any) -> Any:
    return float(value) if parameter.kind == "float" else value


def value_at(layer: Layer, path: KeyPath) -> Any:
    """The value at ``path``, or ``MISSING`` if no value is set there."""
    value: Any = layer.values
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def notes(spec: SweepSpec) -> list[str]:
    """Warnings about settings that are valid but probably not intended, one message each."""
    sweep, found = spec.sweep, []
    number = count(sweep.parameters)
    trials = None if number is None else number * sweep.repeat
    if sweep.method == "grid" and trials is not None and sweep.max_trials is not None and trials > sweep.max_trials:
        found.append(f"the grid has {trials:,} trials, but max_trials allows only the first {sweep.max_trials:,}")
    found += _strange_names(spec)
    if number == 1 and sweep.repeat == 1:
        found.append("the search space contains only one point: there is nothing to search")
    if sweep.max_trials is not None and sweep.max_trials % sweep.repeat:
        usable = sweep.max_trials // sweep.repeat * sweep.repeat
        found.append(
            f"max_trials {sweep.max_trials} is not a multiple of repeat {sweep.repeat}: {usable} trials will run"
        )
    most = min((end for end in (trials, sweep.max_trials) if end is not None), default=None)
    if most is not None and (needed := max(1, -(-most // sweep.pack))) < sweep.workers:
        found.append(
            f"at most {most} trial{'s'[: most > 1]} will run: only {needed} of {sweep.workers} workers will be started"
        )
    if sweep.repeat > 1 and spec.job.entrypoint.kind == "command":
        found.append(
            "repeated trials differ only in runtime.seed, which affects a command only if it uses hpcaccel.Accelerator"
        )
    return found


def _strange_names(spec: SweepSpec) -> list[str]:
    """Warnings about searched arguments that are not in the spec but resemble one in the spec: probably typos."""
    layer, own = layer_of(spec.job), spec.job.entrypoint.args
    found = []
    for name in spec.sweep.parameters:
        path = setting_path(name, layer)
        if path[:2] != ("entrypoint", "args") or value_at(layer, path) is not MISSING or not isinstance(own, dict):
            continue
        if alike := difflib.get_close_matches(str(path[-1]), map(str, own), n=1):
            found.append(
                f"{name} is not in the spec's args: the program must accept it. Did you mean 'args.{alike[0]}'?"
            )
    return found
