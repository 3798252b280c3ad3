"""Dependencies on other runs (``after``): lookup of their directories before anything is submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunNotFound, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import dependency_text
from hpcaccel.spec import JobSpec
from hpcaccel.spec.job.job_spec import Dependency, parse_dependency
from hpcaccel.submission.jobs.backend import Backend, SlurmBackend
from hpcaccel.submission.runs.find import find_run
from hpcaccel.submission.runs.status import status

__all__ = ["After", "backend_waiting", "resolve_after", "with_after"]

After = dict[str, str]
"""A dependency as in ``spec.json``: ``kind``, such as ``afterok``, and ``run``, a directory."""


def with_after(spec: JobSpec, more: Sequence[str]) -> JobSpec:
    """Add the dependencies of the command line to the spec.

    Raises:
        SpecError: a dependency is malformed.
    """
    if not more:
        return spec
    added = []
    for text in more:
        try:
            added.append(str(parse_dependency(text)))
        except ValueError as error:
            raise SpecError(f"--after: {text!r} {error}") from None
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
    """The runs for which the job must wait, without those that have already ended as required.

    Args:
        planned: runs that the same command submits before this one, by name.

    Raises:
        SpecError: the job cannot wait for a run, or a run has ended in a way other than required.
    """
    if spec.after and backend == "local":
        raise SpecError(
            "after: the local backend has no queue, so a run cannot wait for another one. Submit to Slurm, or submit "
            "the runs one after another with --wait"
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
        raise SpecError(
            f"after: {one}: {other.run_id} is a sweep. A run cannot wait for a sweep, because the jobs of the sweep's "
            "workers may end before the sweep has finished"
        )
    if record.cluster != cluster:
        raise SpecError(
            f"after: {one}: run {other.run_id} is on cluster {record.cluster!r}, but this run is on cluster "
            f"{cluster!r}. A run can wait only for runs of its own cluster"
        )
    now = status(RunDir(other.path), slurm)
    if not now.ended and not now.job_id:
        detail = f" ({now.detail})" if now.detail else ""
        raise SpecError(
            f"after: {one}: run {other.run_id} does not have a job yet{detail}. Submit this run again when run "
            f"{other.run_id} has a job"
        )
    if not now.ended:
        return {"kind": one.kind, "run": str(other.path)}
    well = now.state == "completed"
    if one.kind != "afterany" and well != (one.kind == "afterok"):
        advice = f"use afterany:{one.run}"
        if one.kind == "afterok":
            advice = f"resume that run first (`hpcaccel resume {other.run_id}`), or {advice}"
        raise SpecError(
            f"after: {one}: run {other.run_id} has ended with state {now.state!r}, so this run would never start: "
            f"{advice}"
        )
    return None


def backend_waiting(backend: Backend, spec: JobSpec, after: Sequence[After]) -> Backend:
    """A backend whose jobs wait for the runs of ``after``; its --dependency overrides that of the script."""
    text = dependency_text(after, spec.slurm.dependency) if after else ""
    if not text:
        return backend
    assert isinstance(backend, SlurmBackend), "the local backend has no queue"
    return SlurmBackend(backend.slurm, [*backend.options, f"--dependency={text}"])
