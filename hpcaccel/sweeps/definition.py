"""``sweep.json``: what a sweep was started with, and what each of its trials takes from it.

It is a run's ``spec.json`` with three more keys: ``sweep``, the section of that name; ``program``, what the ranks
start, without its arguments, which differ from trial to trial; and ``chooser``, the command of a worker's chooser,
which the host starts with the sweep's directory and the worker's number behind it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpcaccel
from hpcaccel.core.run_dir import SweepDir, read_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.packing import share

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.spec.sweep_fields import SweepSpec

__all__ = ["Definition", "chooser_command", "read_definition", "sweep_document", "sweep_hash"]

_CHOOSER = "import sys; sys.path[0] = {root!r}; from hpcaccel.sweeps.tuner import main; main()"
"""A worker starts in the sweep's own working directory and environment: this finds the package that we are part of."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What ``sweep.json`` holds."""

    spec: SweepSpec
    hash: str
    launch: dict[str, Any]
    """The ``launch`` part of a trial with the spec's own values."""
    program: list[str]
    """What the ranks start, before the arguments."""

    def launch_of(self, job: JobSpec) -> dict[str, Any]:
        """The ``launch`` part of the ``spec.json`` of a trial whose spec is ``job``."""
        own: dict[str, Any] = {"program": [*self.program, *job.arguments()]}
        if job.runtime.stop is not None:
            own |= {"stop": job.runtime.stop, "stop_is_default": False}
        if self.spec.sweep.pack > 1:
            own["ranks_per_node"] = share(job, self.spec.sweep.pack).ranks_per_node
        return {**self.launch, **own}

    def document_of(self, job: JobSpec) -> dict[str, Any]:
        """The whole ``spec.json`` of a trial whose spec is ``job``."""
        from hpcaccel.spec import spec_hash

        part = share(job, self.spec.sweep.pack)
        spec = part.model_dump(mode="json")
        return {"version": 1, "hash": spec_hash(part), "spec": spec, "launch": self.launch_of(job)}


def read_definition(sweep: SweepDir) -> Definition:
    """Raises RunDirectoryError where ``sweep`` is no sweep's directory."""
    from hpcaccel.spec.sweep_fields import SweepSpec

    document = read_json(sweep.sweep)
    if document is None:
        raise RunDirectoryError(f"{sweep.path} is no sweep's directory: it has no {sweep.sweep.name}")
    return Definition(
        spec=SweepSpec.model_validate({"job": document["spec"], "sweep": document["sweep"]}),
        hash=document["hash"],
        launch=document["launch"],
        program=document["program"],
    )


def sweep_document(spec: SweepSpec, launch: Mapping[str, Any]) -> dict[str, Any]:
    """What ``sweep.json`` is to hold; ``launch`` is that of a run with the spec's own values."""
    words = len(spec.job.arguments())
    program = list(launch["program"])
    return {
        "version": 1,
        "hash": sweep_hash(spec),
        "spec": spec.job.model_dump(mode="json"),
        "sweep": spec.sweep.model_dump(mode="json"),
        "launch": dict(launch),
        "program": program[: len(program) - words],
        "chooser": chooser_command(),
    }


def chooser_command() -> list[str]:
    """Starts a worker's chooser, once the sweep's directory and the worker's number are put behind it."""
    root = Path(hpcaccel.__file__).absolute().parent.parent
    return [sys.executable, "-c", _CHOOSER.format(root=str(root))]


def sweep_hash(spec: SweepSpec) -> str:
    """Equal for specs that ask for the same sweep."""
    text = json.dumps(spec.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
