"""The job spec of one trial: the sweep's, with the values of a point in their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer, put
from hpcaccel.spec.overrides import setting_path
from hpcaccel.spec.parameters import Parameter
from hpcaccel.spec.points import applies, contains
from hpcaccel.spec.problems import describe, report
from hpcaccel.spec.sweep_fields import SweepSpec
from hpcaccel.spec.yaml12 import KeyPath

__all__ = ["MISSING", "layer_of", "own_point", "resolve", "seed_of", "value_at"]

MISSING = object()
"""Stands where a spec sets nothing."""


def layer_of(job: JobSpec) -> Layer:
    """The settings of a spec, defaults written out, for others to be laid over."""
    return Layer(job.model_dump(mode="json"))


def resolve(spec: SweepSpec, values: Mapping[str, Any], *, seed: int | None = None) -> JobSpec:
    """The job spec of a trial.

    Args:
        values: the point: parameters, as the file names them, to values.
        seed: ``runtime.seed`` of the trial; None leaves it as it is.

    Raises:
        SpecError: the values do not go together.
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
    """``runtime.seed`` of a point's trial number ``repeat``, counted from 0; None where the spec's own holds.

    The seeds go up from the spec's ``runtime.seed``, or else from ``sweep.seed``.
    """
    if spec.sweep.repeat == 1:
        return None
    first = spec.job.runtime.seed
    return (spec.sweep.seed if first is None else first) + repeat


def own_point(spec: SweepSpec) -> dict[str, Any]:
    """The values that the spec itself has, as far as they lie in the space; others are left out."""
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
    """The value at a path; ``MISSING`` where nothing is set."""
    value: Any = layer.values
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value
