"""``render``: the whole way from a job spec to the text of its batch script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.render.context import template_names
from hpcaccel.render.templates import fill, own_template

if TYPE_CHECKING:
    from hpcaccel.spec.cluster_profile import ClusterProfile
    from hpcaccel.spec.job import JobSpec

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
    """The text of the batch script.

    Args:
        run_dir: of the run; of an array its parent folder. It must exist when the job starts, for an array each
            ``tasks/<i>`` too: Slurm makes no folder for a log.
        python: absolute path of the interpreter that runs the supervisor.
        profile: of the cluster: its variables, and its folder of templates.
        array_size: number of tasks; None for a single job.
        header: what the comment on top says (hash, commit, version), in this order.
        workdir: where the ranks start when the spec does not say; by default the current directory.
        template: the user's own template, instead of the profile's.

    Raises:
        SpecError: a value that cannot be written into a script, or a template of the user's that cannot be filled.
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
