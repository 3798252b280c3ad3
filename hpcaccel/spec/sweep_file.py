"""From a YAML file with a section ``sweep`` to one validated ``SweepSpec``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import SpecError
from hpcaccel.spec.expand import expand
from hpcaccel.spec.extends import read_layers
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.load import check_program, laid_over, validated
from hpcaccel.spec.pipes import base_of
from hpcaccel.spec.problems import report
from hpcaccel.spec.sweep_checks import checked
from hpcaccel.spec.sweep_fields import SweepFile, SweepSpec
from hpcaccel.spec.yaml12 import KeyPath, Place, Problem

if TYPE_CHECKING:
    from hpcaccel.spec.cluster_profile import ClusterProfile

__all__ = ["load_sweep", "sweep_from_values"]


def load_sweep(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
    check_files: bool = True,
) -> SweepSpec:
    """Load a spec file with a section ``sweep``; arguments as for ``load_spec``. Overrides may name keys of the
    section, too: ``sweep.max_trials=10``, or ``max_trials=10``.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    source = Path(path)
    problems: list[Problem] = []
    layer = read_layers(source, str(path), problems)
    layer = laid_over(layer, base_of(source), overrides, profile, problems, SweepFile)
    spec = _sweep(layer, base_of(source), str(path), problems)
    if check_files:
        check_program(spec.job, layer, str(path), base=base_of(source))
    spec.job._source = base_of(source) / source.name
    return spec


def sweep_from_values(
    values: Mapping[str, Any],
    *,
    base: str | os.PathLike[str] = ".",
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
) -> SweepSpec:
    """A sweep from Python values: those of a job spec and ``sweep``. Arguments as for ``spec_from_values``.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    problems: list[Problem] = []
    layer, found = expand(Layer(dict(values)), Path(base).absolute())
    problems += found
    layer = laid_over(layer, Path(base), overrides, profile, problems, SweepFile)
    return _sweep(layer, Path(base), "spec", problems)


def _sweep(layer: Layer, base: Path, source: str, problems: list[Problem]) -> SweepSpec:
    sweep = validated(layer, source, problems, SweepFile).sweep
    job = JobSpec.model_validate({key: value for key, value in layer.values.items() if key != "sweep"})

    def say(path: KeyPath, message: str) -> None:
        whole = ("sweep", *path)
        place = layer.place(whole) or Place(source)
        problems.append(Problem(place, f"{'.'.join(map(str, whole))} {message}"))

    sweep = checked(sweep, job, base, say)
    if problems:
        raise SpecError(report(problems))
    return SweepSpec(job=job, sweep=sweep)
