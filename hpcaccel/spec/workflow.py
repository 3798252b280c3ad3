"""Several jobs in one file: ``jobs:`` maps their names to what each has of its own; what stands beside it they share.

slurm: {partition: gpu}
jobs:
  prepare: {entrypoint: {script: prepare.py}}
  train: {entrypoint: {script: train.py}, after: [prepare]}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import SpecError
from hpcaccel.spec.after_fields import parse_dependency
from hpcaccel.spec.expand import escape, expand
from hpcaccel.spec.files import read_document
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer, merge
from hpcaccel.spec.load import check_program, laid_over, spec_from_values, validated
from hpcaccel.spec.pipes import base_of
from hpcaccel.spec.yaml12 import Document, Place, Problem

if TYPE_CHECKING:
    from hpcaccel.spec.cluster_profile import ClusterProfile

__all__ = ["over_profile", "read_jobs"]

_KEY = "jobs"
_ALONE = ("extends", "name", "after", "sweep")
"""What jobs of one file cannot share."""


def read_jobs(path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> list[JobSpec] | None:
    """The jobs of a file, each behind those that it waits for; None for a file of one job.

    Args:
        overrides: ``key.sub=value`` for all jobs, ``NAME.key.sub=value`` for one of them.

    Raises:
        SpecError: with a line for each thing that is wrong in any of the jobs, or a circle of jobs that wait.
    """
    source = Path(path)
    if not source.is_file():
        return None  # whoever reads it as one job says what is wrong
    document = read_document(source, str(path))
    jobs = document.value.get(_KEY)
    if _KEY not in document.value:
        return None
    if not isinstance(jobs, Mapping) or not jobs:
        raise SpecError(f"{_place(document, str(path))}: jobs must be a mapping of names to jobs: {{train: {{…}}}}")
    problems = [str(problem) for problem in [*document.problems, *_wrongly_shared(document, str(path))]]
    specs = []
    for name in jobs:
        try:
            specs.append(_read(document, source, str(path), str(name), [str(one) for one in jobs], overrides))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return _in_order(specs, _place(document, str(path)))


def over_profile(job: JobSpec, profile: ClusterProfile | None, *, overrides: Sequence[str] = ()) -> JobSpec:
    """One of the jobs of a file with a cluster's defaults under it, and overrides over it.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    values = escape(job.model_dump(mode="json", exclude_unset=True))
    base = Path.cwd() if job.source is None else job.source.parent
    try:
        spec = spec_from_values(values, base=base, overrides=overrides, profile=profile)
    except SpecError as error:
        raise SpecError([f"job {job.name}: {line}" for line in error.problems]) from None
    spec._source = job.source
    return spec


def _place(document: Document, shown: str) -> Place:
    return document.places.get((_KEY,), Place(shown))


def _wrongly_shared(document: Document, shown: str) -> list[Problem]:
    return [
        Problem(document.places.get((key,), Place(shown)), f"{key} is not shared by the jobs of a file: set it per job")
        for key in _ALONE
        if key in document.value
    ]


def _read(
    document: Document, source: Path, shown: str, name: str, names: Sequence[str], overrides: Sequence[str]
) -> JobSpec:
    own: Any = document.value[_KEY][name]
    if own is not None and not isinstance(own, Mapping):
        raise SpecError(f"{document.places.get((_KEY, name), shown)}: jobs.{name} must be a mapping")
    places = {path[2:]: place for path, place in document.places.items() if path[:2] == (_KEY, name)}
    shared = {key: value for key, value in document.value.items() if key != _KEY and key not in _ALONE}
    below = Layer(shared, {path: place for path, place in document.places.items() if path[:1] != (_KEY,)})
    layer = merge(below, Layer({"name": name, **(own or {})}, places))
    layer, problems = expand(layer, base_of(source))
    chosen = [text for text in (_override(one, name, names) for one in overrides) if text is not None]
    layer = laid_over(layer, base_of(source), chosen, None, problems, JobSpec)
    spec = validated(layer, f"{shown}, job {name}", problems, JobSpec)
    if spec.name != name:
        raise SpecError(f"{layer.place(('name',)) or shown}: name {spec.name!r} is not that of the job ({name})")
    check_program(spec, layer, shown, base=base_of(source))
    spec._source = base_of(source) / source.name
    return spec


def _override(text: str, name: str, names: Sequence[str]) -> str | None:
    """An override as it is for the job ``name``; None where it is another job's."""
    head, dot, rest = text.partition(".")
    if not dot or head not in names or "=" in head:
        return text
    return rest if head == name else None


def _in_order(specs: Sequence[JobSpec], place: Place) -> list[JobSpec]:
    """Each job behind those that it waits for, otherwise as they stand in the file."""
    left = {spec.name: spec for spec in specs}
    waits = {
        spec.name: {parse_dependency(text).run for text in spec.after} & left.keys() for spec in specs
    }  # other names are those of runs
    done: list[JobSpec] = []
    while left:
        ready = [name for name in left if not waits[name] & left.keys()]
        if not ready:
            raise SpecError(f"{place}: jobs wait for each other in a circle: {' → '.join(_circle(waits, left))}")
        done += [left.pop(name) for name in ready]
    return done


def _circle(waits: Mapping[str, set[str]], left: Mapping[str, JobSpec]) -> list[str]:
    path = [next(iter(left))]
    while True:
        after = min(waits[path[-1]] & left.keys())
        if after in path:
            return [*path[path.index(after) :], after]
        path.append(after)
