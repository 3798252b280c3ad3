"""Helpers beside the ranks, on nodes of their own kind: the other components of a heterogeneous job.

components:
  data: {entrypoint: {script: serve.py}, slurm: {partition: cpu, nodes: 2, cpus_per_task: 16}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.entrypoint import Entrypoint
from hpcaccel.spec.fields import Conflict, Count, Section
from hpcaccel.spec.resources import Resources
from hpcaccel.spec.slurm import Slurm

__all__ = ["Component", "ComponentName", "ComponentSlurm"]

_NAME = r"[a-z][a-z0-9_]{0,31}"
_TAKEN = ("all", "batch", "ranks", "supervisor")
"""Words that mean something else where a component's name may stand."""
_OF_THE_JOB = tuple(name for name in Slurm.model_fields if name not in Resources.model_fields)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(_NAME, value) or value in _TAKEN:
        raise ValueError(
            "is no component's name (small letters, digits and '_', a letter first, at most 32; not "
            f"{', '.join(_TAKEN)}): it is part of a variable's name and of a log's"
        )
    return value


ComponentName = Annotated[str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]


class ComponentSlurm(Resources):
    """The nodes of a component. Account, partition, qos and reservation are the job's where they are left out."""

    moved: ClassVar[dict[str, str]] = Resources.moved | {
        name: f"is the whole job's: set slurm.{name}" for name in _OF_THE_JOB
    }

    ntasks_per_node: Count | None = Field(default=None, description="Processes on each node. Default: one.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        nodes = str(values.get("nodes") or "1")
        if not nodes.isdecimal():
            found.append(Conflict("nodes", f"{nodes} is not one number: a component has as many nodes as it asks for"))
        extra = values.get("extra")
        for flag in extra if isinstance(extra, Mapping) else ():
            if str(flag).replace("-", "_") in _OF_THE_JOB:
                found.append(Conflict(f"extra.{flag}", f"is the whole job's: set slurm.{str(flag).replace('-', '_')}"))
        return found

    @property
    def ranks_per_node(self) -> int:
        return self.ntasks_per_node or 1


class Component(Section):
    """A program beside the ranks, on nodes of its own: a server of data, an environment, a model that is asked.

    It starts before the ranks with every attempt and is ended after them; where it fails, the attempt has failed.
    """

    entrypoint: Entrypoint = Field(description="What runs on each of the component's nodes.")
    slurm: ComponentSlurm = Field(default_factory=ComponentSlurm, description="Its nodes.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        entrypoint = values.get("entrypoint")
        given = dict(entrypoint) if isinstance(entrypoint, Section | Mapping) else {}
        if given.get("function") is not None:
            found.append(Conflict("entrypoint", "must have one of script, module, command"))
        return found
