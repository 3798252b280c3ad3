"""A group member continues a shared run, as a run of the member's own.

Slurm's jobs belong to users, and the original run directory may be written by its owner only. So the continuation is a
new run, in the member's own runs directory: the same spec, the code that the original run has copied, and the newest
checkpoint as the start. The original run is not changed.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import CheckpointError, RunBusy, RunDirectoryError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.spec.cluster.cluster_profile import profile_names
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.checkpoints import find_checkpoint
from hpcaccel.submission.runs.run_handle import Run
from hpcaccel.submission.runs.run_owner import owner_of
from hpcaccel.submission.runs.status import status
from hpcaccel.submission.submit.api import submit

__all__ = ["continue_as_own"]


def continue_as_own(run: RunDir, *, runs_dir: str | os.PathLike[str] | None = None, slurm: Slurm | None = None) -> Run:
    """Submit a run of this user that continues from the newest checkpoint of ``run``, or from the start without one.

    Raises:
        RunBusy: ``run`` has not ended.
        UserError: ``run`` is completed, is an array or a sweep, or runs a Python function or a module.
        RunDirectoryError: this user may not read the run.
        SpecError, ClusterError, SlurmCommandError: the errors of :func:`hpcaccel.submit`.
    """
    now = status(run, slurm or Slurm())
    if not now.ended:
        raise RunBusy(f"run {now.run_id} is {now.state}: stop it first with `hpcaccel stop {run.path}`")
    if now.state == "completed":
        raise UserError(f"run {now.run_id} is completed: there is nothing to resume")
    if isinstance(run, SweepDir) or now.tasks:
        what, one = ("a sweep", run.trial(0)) if isinstance(run, SweepDir) else ("an array", run.task(0))
        raise UserError(
            f"{now.run_id} is {what} of {owner_of(run)}, and only its owner can continue it as a whole. Continue its "
            f"runs one by one: hpcaccel resume {one.path}"
        )
    record = read_record(run)
    try:
        spec = JobSpec.model_validate(_values(run))
        newest = _newest(run)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {error.filename or run.path}: {error.strerror}") from None
    cluster = record.cluster if record.cluster in profile_names() else record.backend
    made = submit(spec, cluster=cluster, runs_dir=runs_dir, from_run=newest)
    assert isinstance(made, Run)
    return made


def _newest(run: RunDir) -> Path | None:
    try:
        return find_checkpoint(run.checkpoints)
    except CheckpointError:
        return None


def _values(run: RunDir) -> dict[str, Any]:
    """The spec of the continuation: that of ``run``, with the program in its copy of the code."""
    document = read_json(run.spec)
    launch = find_launch(run)
    if document is None or launch is None:
        raise RunDirectoryError(f"{run.path} has no readable {run.spec.name}")
    values: dict[str, Any] = document["spec"]
    entrypoint = values["entrypoint"]
    if launch.callable or entrypoint.get("module") is not None:
        raise UserError(
            f"run {run.run_id} runs a {'Python function' if launch.callable else 'module'}, which only its owner can "
            f"continue. Submit your own file instead: hpcaccel submit job.yaml --from {run.path}"
        )
    copied = next((word for word in launch.program if word.startswith(f"{run.code}{os.sep}")), None)
    if entrypoint.get("script") is not None and copied is not None:
        entrypoint["script"] = copied
        values["code"] = {**values["code"], "copy": False}
        line = f"export PYTHONPATH={shlex.quote(str(run.code))}" + "${PYTHONPATH:+:$PYTHONPATH}"
        values["environment"]["setup"] = [line, *values["environment"]["setup"]]
    if values.get("workdir") is None:
        values["workdir"] = launch.workdir if os.access(launch.workdir, os.X_OK) else os.getcwd()
    values["checkpoint"]["resume"] = "auto"
    values["after"] = []
    values["sharing"] = None
    return _without_nothing(values)


def _without_nothing(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` without what is null: keys that exclude each other may all be in the resolved spec."""
    return {
        key: _without_nothing(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
