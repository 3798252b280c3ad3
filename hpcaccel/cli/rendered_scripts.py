"""The jobs of a spec file and their batch scripts as ``render`` prints them; the profile that --cluster selects."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hpcaccel
from hpcaccel.core.run_dir import RunDir, default_runs_dir

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile, JobSpec

__all__ = ["chosen_profile", "jobs_of", "rendered_scripts"]

RUN_ID = "RUN_ID"
"""Placeholder for the run id in the output of ``render``, so that the same spec always gives the same script."""


def chosen_profile(name: str | None) -> ClusterProfile | None:
    """The profile ``name``, or the default profile if ``name`` is None. Returns None for Slurm on this machine without
    a profile."""
    from hpcaccel.spec import load_profile, profile_names

    if name == "slurm" and name not in profile_names():
        return None
    return load_profile(name)


def jobs_of(
    file: Path, overrides: Sequence[str], profile: ClusterProfile | None, several: Sequence[JobSpec] | None
) -> list[JobSpec]:
    """The jobs of ``file``, with the defaults of ``profile``. ``several`` has the jobs read from the file, or is None
    if the file has a single job."""
    from hpcaccel.spec import load_spec
    from hpcaccel.spec.loading.workflow import over_profile

    if several is None:
        return [load_spec(file, overrides=overrides, profile=profile)]
    return [over_profile(job, profile) for job in several]


def rendered_scripts(
    file: Path, overrides: Sequence[str], profile: ClusterProfile | None, *, runs_dir: Path | None = None
) -> Iterator[str]:
    """The batch scripts of the jobs of ``file``, each after a heading if the file has several jobs.

    Args:
        runs_dir: where the run directories would be; by default ``default_runs_dir``.

    Raises:
        SpecError: a job is not valid or cannot be rendered.
    """
    from hpcaccel.render import render
    from hpcaccel.spec import spec_hash
    from hpcaccel.spec.loading.workflow import read_jobs

    base = runs_dir.absolute() if runs_dir is not None else default_runs_dir(profile.runs_dir if profile else None)
    several = read_jobs(file, overrides=overrides)
    for spec in jobs_of(file, overrides, profile, several):
        script = render(
            spec,
            run_dir=RunDir(base / spec.name / RUN_ID),
            python=sys.executable,
            profile=profile,
            backend=profile.backend if profile is not None else "slurm",
            header={"spec": spec_hash(spec), "hpcaccel": hpcaccel.__version__},
        )
        yield script if several is None else f"### job {spec.name}\n{script}"
