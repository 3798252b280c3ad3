"""The section ``components``: additional programs, each on its own nodes, in one heterogeneous job with the ranks.

::

    components:
      data: {entrypoint: {script: serve.py}, slurm: {partition: cpu, nodes: 2, cpus_per_task: 16}}
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.job.entrypoint import EntrypointSection
from hpcaccel.spec.job.fields import Conflict, Count, Section, section_field
from hpcaccel.spec.job.slurm import Resources, SlurmSection

__all__ = ["ComponentName", "ComponentSection", "ComponentSlurmSection"]

_COMPONENT_NAME = r"[a-z][a-z0-9_]{0,31}"
_TAKEN = ("all", "batch", "ranks", "supervisor")
"""Names that a component cannot have: where a component's name can be given, these names mean something else."""
_OF_THE_JOB = tuple(name for name in SlurmSection.model_fields if name not in Resources.model_fields)


def _component_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(_COMPONENT_NAME, value) or value in _TAKEN:
        raise ValueError(
            "is not a valid component name: use at most 32 lower-case letters, digits and '_', starting with a letter, "
            f"and none of {', '.join(_TAKEN)}. The name becomes part of an environment variable and of a log file name"
        )
    return value


ComponentName = Annotated[
    str, BeforeValidator(_component_name), WithJsonSchema({"type": "string", "pattern": f"^{_COMPONENT_NAME}$"})
]


class ComponentSlurmSection(Resources):
    """The nodes of a component. Account, partition, qos and reservation default to those of the job."""

    moved: ClassVar[dict[str, str]] = Resources.moved | {
        name: f"applies to the whole job: set slurm.{name}" for name in _OF_THE_JOB
    }

    ntasks_per_node: Count | None = Field(default=None, description="Processes per node. Default: 1.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        nodes = str(values.get("nodes") or "1")
        if not nodes.isdecimal():
            found.append(Conflict("nodes", f"{nodes} is not a single number: a component has a fixed number of nodes"))
        extra = values.get("extra")
        for flag in extra if isinstance(extra, Mapping) else ():
            if str(flag).replace("-", "_") in _OF_THE_JOB:
                found.append(
                    Conflict(f"extra.{flag}", f"applies to the whole job: set slurm.{str(flag).replace('-', '_')}")
                )
        return found

    @property
    def ranks_per_node(self) -> int:
        return self.ntasks_per_node or 1


class ComponentSection(Section):
    """An additional program on its own nodes, such as a data server, an environment or an inference server.

    It is started before the ranks of each attempt and stopped after them. If it fails, the attempt fails.
    """

    entrypoint: EntrypointSection = Field(description="The program to run on each node of the component.")
    slurm: ComponentSlurmSection = section_field("The nodes of the component.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        entrypoint = values.get("entrypoint")
        given = dict(entrypoint) if isinstance(entrypoint, Section | Mapping) else {}
        if given.get("function") is not None:
            found.append(Conflict("entrypoint", "must have one of script, module, command"))
        return found
