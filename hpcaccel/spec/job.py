"""The job spec: all that a user may ask for, in one frozen model. The field descriptions are the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from hpcaccel.spec.after_fields import After
from hpcaccel.spec.component_fields import Component, ComponentName
from hpcaccel.spec.container_fields import Container
from hpcaccel.spec.entrypoint import Entrypoint
from hpcaccel.spec.environment_fields import Code, Environment
from hpcaccel.spec.fields import Conflict, PathText, Section
from hpcaccel.spec.slurm import Slurm, Srun
from hpcaccel.spec.stage_fields import Stage
from hpcaccel.spec.training_fields import Checkpoint, Resilience, Runtime
from hpcaccel.spec.yaml12 import Plain

__all__ = ["JobSpec"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def _name(value: Any) -> str:
    text = value.text if isinstance(value, Plain) else value
    if not isinstance(text, str) or not re.fullmatch(_NAME, text):
        raise ValueError(
            "is not a name (letters, digits, '.', '_' and '-', a letter or digit first, at most 64): it names a folder"
        )
    return text


def _part(values: dict[str, Any], key: str) -> Mapping[str, Any]:
    """A section, validated or as read; empty where it is something else."""
    section = values.get(key)
    return dict(section) if isinstance(section, Section | Mapping) else {}


class JobSpec(Section):
    """One training: what runs, where, with which resources, and what happens when the machines go away."""

    moved: ClassVar[dict[str, str]] = {
        "sweep": "is for `hpcaccel sweep start`, which runs many trials of this file: use that, or remove it here",
        "extends": "is read from files only",
        "jobs": "is for `hpcaccel submit`, which takes several jobs of one file: nothing but what they share stands "
        "beside it",
    }

    name: Annotated[
        str, BeforeValidator(_name), WithJsonSchema({"type": ["string", "integer"], "pattern": f"^{_NAME}$"})
    ] = Field(description="A short name: of the Slurm job and of the folder that holds the runs.", examples=["gpt"])
    entrypoint: Entrypoint = Field(description="What the ranks run.")
    slurm: Slurm = Field(default_factory=Slurm, description="Resources and queue, in sbatch's own words.")
    srun: Srun = Field(default_factory=Srun, description="More flags for srun.")
    components: dict[ComponentName, Component] = Field(
        default_factory=dict,
        description="Programs beside the ranks, each on nodes of its own kind: together they are one heterogeneous "
        "job. Every process finds the nodes of component data in HPCACCEL_NODES_DATA, those of the ranks in "
        "HPCACCEL_NODES.",
        examples=[{"data": {"entrypoint": {"script": "serve.py"}, "slurm": {"partition": "cpu", "nodes": 2}}}],
    )
    environment: Environment = Field(
        default_factory=Environment, description="What has to be there before the ranks start."
    )
    launcher: Literal["srun", "torchrun"] = Field(
        default="srun",
        description="srun: Slurm starts every rank. torchrun: it starts one torchrun on each node, which starts the "
        "node's ranks. Environment, logs, signals and what follows are the same.",
    )
    container: Container | None = Field(default=None, description="An image that the ranks run in.")
    stage: Stage | None = Field(default=None, description="Data to copy to the nodes' own disks.")
    after: list[After] = Field(
        default_factory=list,
        description="Runs that must have ended before this one starts, by name, run id or job id: NAME or afterok:NAME "
        "(it has ended well), afterany:NAME, afternotok:NAME. What counts is the end of the run, however often it is "
        "requeued before.",
        examples=[["prepare", "afterany:clean"]],
    )
    code: Code = Field(default_factory=Code, description="The copy of the code that the run keeps.")
    workdir: PathText | None = Field(
        default=None, description="Where the ranks start. Default: the directory where submit was called."
    )
    runtime: Runtime = Field(default_factory=Runtime, description="Settings of hpcaccel.Accelerator.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When to save and what to start from.")
    resilience: Resilience = Field(default_factory=Resilience, description="What happens when nodes are lost.")

    _source: Path | None = PrivateAttr(default=None)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        components = values.get("components")
        if isinstance(components, Mapping) and components and _part(values, "resilience").get("chain") is not None:
            advice = "cannot stand beside components: a chain is for jobs of one kind of node. Leave one of them out"
            found.append(Conflict("resilience.chain", advice))
        if values.get("container") is None:
            return found
        environment, srun, entrypoint = (_part(values, key) for key in ("environment", "srun", "entrypoint"))
        for key in ("conda", "venv"):
            if environment.get(key) is not None:
                advice = "is outside of the container, whose image brings its own Python (environment.python names it)"
                found.append(Conflict(f"environment.{key}", advice))
        for index, word in enumerate(srun.get("extra") or []):
            if str(word).startswith(("--container", "--no-container")):
                found.append(Conflict(f"srun.extra.{index}", f"{str(word)!r} is set by the section container"))
        if entrypoint.get("function") is not None:
            found.append(
                Conflict("container", "is for scripts, modules and commands: a Python function would need submitit")
            )
        return found

    @property
    def source(self) -> Path | None:
        """The file that this spec was loaded from; no part of the spec itself."""
        return self._source

    @property
    def ranks_per_node(self) -> int:
        return self.slurm.ranks_per_node

    def of_component(self, name: str) -> JobSpec:
        """The spec of a job like this one that is its component ``name`` alone."""
        own = self.components[name]
        inherited = {
            key: getattr(own.slurm, key) or getattr(self.slurm, key)
            for key in ("account", "partition", "qos", "reservation")
        }
        fields = {**dict(own.slurm), **inherited, "ntasks_per_node": own.slurm.ranks_per_node}
        slurm = self.slurm.model_copy(update=fields)
        return self.model_copy(update={"entrypoint": own.entrypoint, "slurm": slurm, "components": {}})

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes together, those of components too."""
        parts = [self, *(self.of_component(name) for name in self.components)]
        return sum(one.slurm.min_nodes * one.slurm.node_gpus for one in parts)

    @property
    def total_nodes(self) -> int:
        """The least number of nodes, those of components too."""
        return self.slurm.min_nodes + sum(one.slurm.min_nodes for one in self.components.values())

    @property
    def stop_mode(self) -> Literal["cooperative", "signals"]:
        """How the ranks are asked to stop: as ``runtime.stop`` says, otherwise by the kind of the entrypoint."""
        return self.runtime.stop or ("signals" if self.entrypoint.kind == "command" else "cooperative")

    @property
    def warning_seconds(self) -> int:
        """How long before the time limit the ranks are asked to leave: ``resilience.warning_seconds``, but at most
        half of a limit that is short."""
        limit = self.slurm.time_seconds
        wanted = self.resilience.warning_seconds
        return wanted if limit is None else max(1, min(wanted, limit // 2))

    def arguments(self) -> list[str]:
        """The words that follow the program on every rank."""
        return self.entrypoint.arguments()

    def __eq__(self, other: object) -> bool:
        """Equal when they ask for the same, wherever they were loaded from."""
        return isinstance(other, JobSpec) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())
