"""``after:``: from the names of runs to their directories, before anything is submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunNotFound, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import dependency_text
from hpcaccel.spec import JobSpec
from hpcaccel.spec.after_fields import Dependency, parse_dependency
from hpcaccel.submission.backend import Backend, SlurmBackend
from hpcaccel.submission.find import find_run
from hpcaccel.submission.status import status

__all__ = ["After", "backend_waiting", "resolve_after", "with_after"]

After = dict[str, str]
"""``kind`` and ``run``, a directory: as it stands in ``spec.json``."""


def with_after(spec: JobSpec, more: Sequence[str]) -> JobSpec:
    """The spec with dependencies from the command line behind its own.

    Raises:
        SpecError: one is not written as it should be.
    """
    if not more:
        return spec
    try:
        added = [str(parse_dependency(text)) for text in more]
    except ValueError as error:
        raise SpecError(f"--after: {' '.join(more)!r} {error}") from None
    return spec.model_copy(update={"after": list(dict.fromkeys([*spec.after, *added]))})


def resolve_after(
    spec: JobSpec,
    *,
    backend: Literal["slurm", "local"],
    cluster: str,
    runs_dir: Path,
    slurm: Slurm | None,
    planned: Mapping[str, RunDir],
) -> list[After]:
    """The runs to wait for. Those that are over already and ended as wanted are left out.

    Args:
        planned: runs that are submitted just before, by name.

    Raises:
        SpecError: a name that no run has, or a run whose end can never be as wanted.
    """
    if spec.after and backend == "local":
        raise SpecError(
            "after: the local backend has no queue to wait in: submit to Slurm, or run one after another with --wait"
        )
    found = (_resolve(parse_dependency(text), cluster, runs_dir, slurm, planned) for text in spec.after)
    return [one for one in found if one is not None]


def _resolve(
    one: Dependency, cluster: str, runs_dir: Path, slurm: Slurm | None, planned: Mapping[str, RunDir]
) -> After | None:
    if one.run in planned:
        return {"kind": one.kind, "run": str(planned[one.run].path)}
    try:
        other = find_run(one.run, runs_dir=runs_dir, slurm=slurm)
    except RunNotFound as error:
        raise SpecError(f"after: {one}: {error}") from None
    record = other.record
    if record.kind == "sweep":
        raise SpecError(f"after: {one}: {other.run_id} is a sweep, and its workers' jobs end before it may be over")
    if record.cluster != cluster:
        raise SpecError(f"after: {one}: run {other.run_id} is on cluster {record.cluster}, and this one on {cluster}")
    now = status(RunDir(other.path), slurm)
    if not now.ended and not now.job_id:
        raise SpecError(
            f"after: {one}: run {other.run_id} has no job yet to wait for: {now.detail}. Submit this once "
            "that run has a job"
        )
    if not now.ended:
        return {"kind": one.kind, "run": str(other.path)}
    well = now.state == "completed"
    if one.kind != "afterany" and well != (one.kind == "afterok"):
        raise SpecError(
            f"after: {one}: run {other.run_id} is {now.state}, so that this run would never start. "
            f"Go on with it first (`hpcaccel resume {other.run_id}`), or write afterany:{one.run}"
        )
    return None


def backend_waiting(backend: Backend, spec: JobSpec, after: Sequence[After]) -> Backend:
    """A backend whose jobs wait for the ends of those runs, instead of what the script says of dependencies."""
    text = dependency_text(after, spec.slurm.dependency) if after else ""
    if not text:
        return backend
    assert isinstance(backend, SlurmBackend), "the local backend has no queue"
    return SlurmBackend(backend.slurm, [*backend.options, f"--dependency={text}"])
