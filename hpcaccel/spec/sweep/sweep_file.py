"""Loading a ``SweepSpec`` from a YAML file with a section ``sweep``, or from Python values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import SpecError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.loading.expand import layer_of_values
from hpcaccel.spec.loading.layers import Layer, base_of, document_of
from hpcaccel.spec.loading.load import TEXT, check_program, laid_over, layers_of, read_layers, validated
from hpcaccel.spec.loading.problems import report as problem_lines
from hpcaccel.spec.sweep.sweep_checks import checked
from hpcaccel.spec.sweep.sweep_fields import SweepFile, SweepSpec
from hpcaccel.spec.yaml12 import KeyPath, Problem, SourceLocation

if TYPE_CHECKING:
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile

__all__ = ["load_sweep", "load_sweep_text", "sweep_from_values"]


def load_sweep(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
    check_files: bool = True,
) -> SweepSpec:
    """Load a spec file with a section ``sweep``. See ``load_spec`` for the arguments.

    Overrides can also set keys of the section: ``sweep.max_trials=10``, or ``max_trials=10``.

    Raises:
        SpecError: a file or an override is not valid, or a file cannot be read; one line per problem.
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


def load_sweep_text(
    text: str, *, base: Path, overrides: Sequence[str] = (), profile: ClusterProfile | None = None
) -> SweepSpec:
    """Load a sweep from the text of a YAML file. See ``load_text`` for the arguments.

    Raises:
        SpecError: the text or an override is not valid; one line per problem.
    """
    problems: list[Problem] = []
    layer = layers_of(document_of(text, TEXT), base / "(text)", TEXT, problems)
    layer = laid_over(layer, base, overrides, profile, problems, SweepFile)
    spec = _sweep(layer, base, TEXT, problems)
    check_program(spec.job, layer, TEXT, base=base)
    spec.job._source = base / TEXT
    return spec


def sweep_from_values(
    values: Mapping[str, Any],
    *,
    base: str | os.PathLike[str] = ".",
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
) -> SweepSpec:
    """Build a sweep from Python values: the values of a job spec with a section ``sweep``. See ``spec_from_values`` for
    the arguments.

    Raises:
        SpecError: a value or an override is not valid; one line per problem.
    """
    problems: list[Problem] = []
    layer = layer_of_values(values, base, problems)
    layer = laid_over(layer, Path(base), overrides, profile, problems, SweepFile)
    return _sweep(layer, Path(base), "spec", problems)


def _sweep(layer: Layer, base: Path, source: str, problems: list[Problem]) -> SweepSpec:
    sweep = validated(layer, source, problems, SweepFile).sweep
    job = JobSpec.model_validate({key: value for key, value in layer.values.items() if key != "sweep"})

    def report(path: KeyPath, message: str) -> None:
        whole = ("sweep", *path)
        place = layer.place(whole) or SourceLocation(source)
        problems.append(Problem(place, f"{'.'.join(map(str, whole))} {message}"))

    sweep = checked(sweep, job, base, report)
    if problems:
        raise SpecError(problem_lines(problems))
    return SweepSpec(job=job, sweep=sweep)
