"""Several jobs in one file: ``jobs:`` maps names to the settings of each job; the keys beside ``jobs`` are shared.

Example::

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
from hpcaccel.spec.job.job_spec import JobSpec, parse_dependency
from hpcaccel.spec.loading.expand import escape, expand
from hpcaccel.spec.loading.layers import Layer, base_of, merge, read_document
from hpcaccel.spec.loading.load import check_program, laid_over, spec_from_values, validated
from hpcaccel.spec.yaml12 import Document, Problem, SourceLocation

if TYPE_CHECKING:
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile

__all__ = ["over_profile", "read_jobs"]

_KEY = "jobs"
_ALONE = {
    "extends": "remove it",
    "name": "each job is named by its key in jobs",
    "after": "set it in each job",
    "sweep": "remove it, or move it to a file with a single job",
}
"""Keys that the jobs of a file cannot share, and what to do instead."""


def read_jobs(path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> list[JobSpec] | None:
    """Read the jobs of a file. Returns each job after the jobs that it depends on, or None if the file has no ``jobs``.

    Args:
        overrides: ``key.sub=value`` applies to all jobs, ``NAME.key.sub=value`` to the job ``NAME`` only.

    Raises:
        SpecError: jobs are not valid (one line per problem of all jobs), or jobs depend on each other in a cycle.
    """
    source = Path(path)
    if not source.is_file():
        return None  # the caller then reads the file as a single job, which reports the error
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
    """Merge a job of a file over a cluster's defaults, and ``overrides`` over the job.

    Raises:
        SpecError: the result, or an override, is not valid; one line per problem.
    """
    values = escape(job.model_dump(mode="json", exclude_unset=True))
    base = Path.cwd() if job.source is None else job.source.parent
    try:
        spec = spec_from_values(values, base=base, overrides=overrides, profile=profile)
    except SpecError as error:
        raise SpecError([f"job {job.name}: {line}" for line in error.problems]) from None
    spec._source = job.source
    return spec


def _place(document: Document, shown: str) -> SourceLocation:
    return document.places.get((_KEY,), SourceLocation(shown))


def _wrongly_shared(document: Document, shown: str) -> list[Problem]:
    return [
        Problem(
            document.places.get((key,), SourceLocation(shown)),
            f"{key} cannot be set for all jobs of a file: {advice}",
        )
        for key, advice in _ALONE.items()
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
        raise SpecError(
            f"{layer.place(('name',)) or shown}: name {spec.name!r} must be equal to the job's key in jobs ({name!r})"
        )
    check_program(spec, layer, shown, base=base_of(source))
    spec._source = base_of(source) / source.name
    return spec


def _override(text: str, name: str, names: Sequence[str]) -> str | None:
    """The override without its job prefix, or None if the override is for a job other than ``name``."""
    head, dot, rest = text.partition(".")
    if not dot or head not in names or "=" in head:
        return text
    return rest if head == name else None


def _in_order(specs: Sequence[JobSpec], place: SourceLocation) -> list[JobSpec]:
    """Sort the jobs so that each comes after its dependencies."""
    left = {spec.name: spec for spec in specs}
    waits = {
        spec.name: {parse_dependency(text).run for text in spec.after} & left.keys() for spec in specs
    }  # other names refer to runs
    done: list[JobSpec] = []
    while left:
        ready = [name for name in left if not waits[name] & left.keys()]
        if not ready:
            raise SpecError(f"{place}: jobs depend on each other in a cycle: {' → '.join(_circle(waits, left))}")
        done += [left.pop(name) for name in ready]
    return done


def _circle(waits: Mapping[str, set[str]], left: Mapping[str, JobSpec]) -> list[str]:
    path = [next(iter(left))]
    while True:
        after = min(waits[path[-1]] & left.keys())
        if after in path:
            return [*path[path.index(after) :], after]
        path.append(after)
