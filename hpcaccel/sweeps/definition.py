"""``sweep.json``, the definition of a sweep, and the creation of trial directories from it.

The file is a run's ``spec.json`` with three more keys: ``sweep``, the spec's ``sweep`` section; ``program``, the
ranks' program without its arguments, which differ between trials; and ``chooser``, the command that starts a
worker's tuner (the sweep's directory and the worker's number are appended to it).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpcaccel
from hpcaccel.core.durable_files import atomic_write, fsync_directory, read_json, write_json
from hpcaccel.core.launch_spec import LaunchSpec, launch_of
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError, UserError
from hpcaccel.spec import JobSpec, spec_hash, to_yaml
from hpcaccel.spec.loading.canonical import sweep_to_yaml
from hpcaccel.submission.jobs.run_state import read_record

if TYPE_CHECKING:
    from hpcaccel.spec.sweep.sweep_fields import SweepSpec

__all__ = [
    "Definition",
    "check_packages",
    "chooser_command",
    "make_trial",
    "read_definition",
    "resolved_yaml",
    "share",
    "sweep_document",
    "sweep_hash",
]

_CHOOSER = "import sys; sys.path[0] = {root!r}; from hpcaccel.sweeps.tuner import main; main()"
"""Starts a worker's tuner. A worker runs in the sweep's working directory and environment, but the tuner must come from
the hpcaccel package that submitted the sweep: ``root`` is the folder that contains this package."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """The contents of ``sweep.json``."""

    spec: SweepSpec
    hash: str
    launch: LaunchSpec
    """The launch spec of the job spec as written, without any trial's parameters. Each trial's launch spec is derived
    from it."""
    program: list[str]
    """The ranks' program, without its arguments."""

    def launch_of(self, job: JobSpec) -> LaunchSpec:
        """The ``launch`` section in the ``spec.json`` of a trial whose spec is ``job``."""
        watch = job.launch_watch(self.launch.workdir)
        program, resume_args = [*self.program, *job.arguments()], job.resume_arguments()
        launch = replace(self.launch, program=program, watch=watch, resume_args=resume_args)
        if job.runtime.stop is not None:
            launch = replace(launch, stop=job.runtime.stop, stop_is_default=False)
        if self.spec.sweep.pack > 1:
            launch = replace(launch, ranks_per_node=share(job, self.spec.sweep.pack).ranks_per_node)
        return launch

    def document_of(self, job: JobSpec) -> dict[str, Any]:
        """The whole ``spec.json`` of a trial whose spec is ``job``."""
        from hpcaccel.spec import spec_hash

        part = share(job, self.spec.sweep.pack)
        spec = part.model_dump(mode="json")
        return {"version": 1, "hash": spec_hash(part), "spec": spec, "launch": self.launch_of(job).to_dict()}


def read_definition(sweep: SweepDir) -> Definition:
    """Read ``sweep.json``.

    Raises:
        RunDirectoryError: ``sweep`` is not a sweep directory, or an incompatible version wrote its ``launch`` section.
    """
    from hpcaccel.spec.sweep.sweep_fields import SweepSpec

    document = read_json(sweep.sweep)
    if document is None:
        raise RunDirectoryError(f"{sweep.path} is not the directory of a sweep: it has no {sweep.sweep.name}")
    return Definition(
        spec=SweepSpec.model_validate({"job": document["spec"], "sweep": document["sweep"]}),
        hash=document["hash"],
        launch=launch_of(document, source=sweep.sweep),
        program=document["program"],
    )


def sweep_document(spec: SweepSpec, launch: LaunchSpec) -> dict[str, Any]:
    """The contents of ``sweep.json``. ``launch`` is the launch spec of the job spec as written, without any trial's
    parameters."""
    words = len(spec.job.arguments())
    program = launch.program
    return {
        "version": 1,
        "hash": sweep_hash(spec),
        "spec": spec.job.model_dump(mode="json"),
        "sweep": spec.sweep.model_dump(mode="json"),
        "launch": launch.to_dict(),
        "program": program[: len(program) - words],
        "chooser": chooser_command(),
    }


def chooser_command() -> list[str]:
    """The command that starts a worker's tuner; the sweep's directory and the worker's number are appended."""
    root = Path(hpcaccel.__file__).absolute().parent.parent
    return [sys.executable, "-c", _CHOOSER.format(root=str(root))]


def sweep_hash(spec: SweepSpec) -> str:
    """The SHA-256 hash, in hex, of the resolved spec with all defaults."""
    text = json.dumps(spec.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


_COUNTED = re.compile(r"(?<![\w.])\d+(?=,|$)")
_GPUS = re.compile(r"(?<![\w])(gpu(?::[^:,]+)?:)(\d+)")


def share(job: JobSpec, pack: int) -> JobSpec:
    """The spec of one of ``pack`` trials that share an allocation (``sweep.pack``).

    The ``slurm`` section of a sweep describes a worker's allocation. A trial's spec requests a share of it, so that the
    trial's ranks match its GPUs. Submitted alone, the best trial's spec runs with as many ranks as in the sweep.
    Counts are rounded down, but are at least one.
    """
    if pack == 1:
        return job
    slurm = job.slurm
    update: dict[str, Any] = {}
    if slurm.ntasks_per_node is not None:
        update["ntasks_per_node"] = max(1, slurm.ntasks_per_node // pack)
    if slurm.gpus_per_node is not None:
        update["gpus_per_node"] = _COUNTED.sub(lambda found: _part(found[0], pack), slurm.gpus_per_node)
    if slurm.gpus_per_task is not None and (slurm.ntasks_per_node or 1) < pack:
        update["gpus_per_task"] = _COUNTED.sub(lambda found: _part(found[0], pack), slurm.gpus_per_task)
    if slurm.gres is not None:
        update["gres"] = _GPUS.sub(lambda found: found[1] + _part(found[2], pack), slurm.gres)
    if slurm.mem_megabytes:
        update["mem"] = f"{max(1, slurm.mem_megabytes // pack)}M"
    if slurm.cpus_per_task is not None:
        # If a trial has fewer ranks than the worker, each rank keeps its CPUs; otherwise the CPUs are divided.
        fewer = slurm.ranks_per_node // slurm.model_copy(update=update).ranks_per_node
        update["cpus_per_task"] = max(1, slurm.cpus_per_task * fewer // pack)
    return job.model_copy(update={"slurm": slurm.model_copy(update=update)})


def _part(count: str, pack: int) -> str:
    return str(max(1, int(count) // pack))


_NEEDS = {"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}


def resolved_yaml(spec: SweepSpec) -> str:
    """The contents of ``sweep.yaml``."""
    origin = f" of {spec.source}" if spec.source is not None else ""
    return f"# The resolved sweep{origin}, with all defaults.\n{sweep_to_yaml(spec)}"


def check_packages(method: str) -> None:
    """Check, without importing them, that the packages of a search method are installed in this Python.

    The workers' tuners run in the same Python.

    Raises:
        UserError: a package is missing.
    """
    needed = ["optuna", *_NEEDS.get(method, [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "hpcaccel[sweep,train]" if "torch" in missing else "hpcaccel[sweep]"
        raise UserError(
            f"sweep.method {method} needs packages that are not installed for {sys.executable} "
            f"({', '.join(missing)}): pip install '{extra}'"
        )


def make_trial(
    sweep: SweepDir, number: int, *, definition: Definition, job: JobSpec, overrides: Mapping[str, Any]
) -> RunDir:
    """Create ``trials/<number>`` atomically, or return the existing one unchanged.

    The trial's directory is a run directory without the code and the batch step's program, which are in the sweep's
    directory.

    Args:
        job: the trial's spec.
        overrides: the trial's parameter values, by path, for display.

    Raises:
        RunDirectoryError: the directory cannot be written, or the sweep's record cannot be read.
    """
    trial = sweep.trial(number)
    place = RunDir(sweep.trials / f".{number}.{os.getpid()}.tmp")
    if trial.spec.exists():
        return trial
    try:
        shutil.rmtree(place.path, ignore_errors=True)
        place.create()
        _fill(place, definition, job, number)
        record = read_record(sweep)
        own = replace(
            record,
            kind="run",
            run_id=trial.run_id,
            created=time.time(),
            spec_hash=spec_hash(share(job, definition.spec.sweep.pack)),
            array_size=None,
            job_ids=[],
            packages={},
            overrides=dict(overrides),
        )
        write_json(place.record, to_dict(own), sync=False)
        _publish(place, trial)
    except OSError as error:
        shutil.rmtree(place.path, ignore_errors=True)
        raise RunDirectoryError(f"cannot write trial {number} to {trial.path}: {error.strerror or error}") from error
    return trial


def _fill(place: RunDir, definition: Definition, job: JobSpec, number: int) -> None:
    part = share(job, definition.spec.sweep.pack)
    atomic_write(place.spec_yaml, f"# Trial {number}: the resolved spec.\n{to_yaml(part)}", sync=False)
    document = json.dumps(definition.document_of(job), indent=1, ensure_ascii=False)
    atomic_write(place.spec, document + "\n")  # a trial with this file counts as written


def _publish(place: RunDir, trial: RunDir) -> None:
    """Rename ``place`` to ``trial``, unless another process has created the same trial."""
    try:
        os.rename(place.path, trial.path)
    except OSError:
        if not trial.spec.exists():
            raise
        shutil.rmtree(place.path, ignore_errors=True)
        return
    fsync_directory(trial.path.parent)
