"""Rendering of a job spec into the text of a batch script, without writing files or starting processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.render.context import template_names
from hpcaccel.render.templates import fill, own_template

if TYPE_CHECKING:
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile
    from hpcaccel.spec.job.job_spec import JobSpec

__all__ = ["render"]


def render(
    spec: JobSpec,
    *,
    run_dir: RunDir,
    python: str,
    profile: ClusterProfile | None = None,
    array_size: int | None = None,
    backend: Literal["slurm", "local"] = "slurm",
    header: Mapping[str, object],
    workdir: str | os.PathLike[str] | None = None,
    template: Path | None = None,
) -> str:
    """Render the batch script and return its text.

    Args:
        run_dir: the run directory; for an array, the directory that contains ``tasks``. It must exist when the job
            starts, and so must each ``tasks/<i>`` of an array: Slurm might not create a log file's directory.
        python: absolute path of the interpreter that runs the supervisor.
        profile: the cluster's profile, for its variables, excluded nodes and templates.
        array_size: number of tasks; None for a single job.
        header: entries of the comment at the top of the script (hash, commit, version), in the mapping's order.
        workdir: working directory of the ranks if the spec sets none; by default the current directory.
        template: a template file, or a directory of templates, to use instead of the profile's.

    Raises:
        SpecError: a value or a variable's name is not allowed in a script, or the user's template does not exist or
            cannot be rendered.
    """
    names = template_names(
        spec,
        run_dir=run_dir,
        python=python,
        workdir=os.path.join(os.getcwd(), spec.workdir or workdir or ""),
        profile=profile,
        array_size=array_size,
        backend=backend,
        header=header,
    )
    place = template or (Path(profile.templates) if profile and profile.templates else None)
    return fill(names, own=own_template(place) if place else None)
