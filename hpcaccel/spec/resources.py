"""What nodes to ask Slurm for, in sbatch's own words: what each part of a job may have of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec import quantities
from hpcaccel.spec.fields import (
    CommaList,
    Conflict,
    Count,
    Flag,
    Gpus,
    Gres,
    Memory,
    Natural,
    Nodes,
    Section,
    Word,
    checked_text,
)
from hpcaccel.spec.owned_flags import HETEROGENEOUS, OWNED_FLAGS, extra_advice
from hpcaccel.spec.yaml12 import Plain

__all__ = ["Resources", "asks_for_gpus"]

_FLAG_NAME = re.compile(r"[a-z][a-z0-9-]*[a-z0-9]", re.ASCII)


def _exclusive(value: Any) -> Any:
    if isinstance(value, Plain):
        value = value.value if isinstance(value.value, bool) else value.text
    if isinstance(value, bool) or value in ("user", "mcs", "topo"):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError("must be true, false, user, mcs or topo")


def _extra(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of sbatch's option names: {switches: 1@10:00}")
    return {str(key): _extra_value(key, item) for key, item in value.items()}


def _extra_value(key: Any, value: Any) -> str | bool:
    name = str(key)
    if not _FLAG_NAME.fullmatch(name):
        raise ValueError(f"has the key {name!r}: write the long name of an option of sbatch's, without dashes in front")
    if isinstance(value, Plain):
        value = value.value if isinstance(value.value, bool) else value.text
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text or a number, or true for an option without a value")
    try:
        return checked_text(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class Resources(Section):
    """Nodes of one kind, by the long names of sbatch's options with _ for -."""

    moved: ClassVar[dict[str, str]] = {name.replace("-", "_"): advice for name, advice in OWNED_FLAGS.items()} | {
        "het": HETEROGENEOUS,
        "hetjob": HETEROGENEOUS,
    }
    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("mem", "mem_per_cpu", "mem_per_gpu"),)

    account: Word | None = Field(default=None, description="The account that is charged.")
    partition: CommaList | None = Field(
        default=None,
        description="The partition, or several of which Slurm takes the one that starts first.",
        examples=["gpu"],
    )
    qos: Word | None = Field(default=None, description="The quality of service.")
    reservation: Word | None = Field(default=None, description="A reservation to run in.")
    nodes: Nodes = Field(
        default="1", description="Number of nodes: 4, a range such as 2-4, or a list of sizes.", examples=[1, "2-4"]
    )
    ntasks_per_node: Count | None = Field(
        default=None, description="Ranks on each node. Default: the GPUs of a node, 1 where no GPUs are asked for."
    )
    cpus_per_task: Count | None = Field(default=None, description="CPU cores of each rank.")
    gpus_per_node: Gpus | None = Field(
        default=None, description="GPUs of each node, with or without their type.", examples=[2, "a100:2"]
    )
    gpus_per_task: Gpus | None = Field(
        default=None,
        description="GPUs of each rank; needs ntasks_per_node for more than one rank. Each rank sees all GPUs of its "
        "node and takes that of its local rank, unless gpu_bind says otherwise.",
    )
    gres: Gres | None = Field(
        default=None,
        description="Generic resources of each node, where a site wants GPUs in this form.",
        examples=["gpu:a100:2"],
    )
    mem: Memory | None = Field(
        default=None,
        description="Memory of each node: 40G, 40000M; without a letter megabytes; 0 is all of it.",
        examples=["40G"],
    )
    mem_per_cpu: Memory | None = Field(default=None, description="Memory for each CPU core, instead of mem.")
    mem_per_gpu: Memory | None = Field(default=None, description="Memory for each GPU, instead of mem.")
    constraint: Word | None = Field(
        default=None, description="Features that the nodes must have.", examples=["a100&ib"]
    )
    exclude: CommaList | None = Field(default=None, description="Nodes to keep away from.", examples=["n[01-03]"])
    nodelist: CommaList | None = Field(default=None, description="Nodes that the job must have.")
    exclusive: Annotated[
        bool | Literal["user", "mcs", "topo"] | None,
        BeforeValidator(lambda value: None if value is None else _exclusive(value)),
        WithJsonSchema({"enum": [True, False, "user", "mcs", "topo", None]}),
    ] = Field(default=None, description="Share the nodes with nobody (true), or only with jobs of the same user.")
    cores_per_socket: Count | None = Field(default=None, description="Only nodes with at least so many cores a socket.")
    cpus_per_gpu: Count | None = Field(default=None, description="CPU cores for each GPU, instead of cpus_per_task.")
    gpu_bind: Word | None = Field(default=None, description="How ranks are bound to GPUs.", examples=["single:1"])
    hint: Word | None = Field(default=None, description="Binding hints.", examples=["nomultithread"])
    licenses: CommaList | None = Field(default=None, description="Licences that the job takes.")
    network: Word | None = Field(default=None, description="Network of the nodes, as the site defines it.")
    oversubscribe: Flag | None = Field(default=None, description="Let other jobs share the job's resources.")
    sockets_per_node: Count | None = Field(default=None, description="Only nodes with at least so many sockets.")
    switches: Word | None = Field(
        default=None, description="Most switches, and how long to wait for them.", examples=["1@10:00"]
    )
    threads_per_core: Natural | None = Field(default=None, description="Threads of each core to use.")
    tmp: Memory | None = Field(default=None, description="Temporary disk of each node.")
    extra: Annotated[
        dict[str, str | bool],
        BeforeValidator(_extra),
        WithJsonSchema({"type": ["object", "null"], "additionalProperties": {"type": ["string", "number", "boolean"]}}),
    ] = Field(
        default_factory=dict,
        description="Any other option of sbatch's, by its long name without dashes in front; true for one that takes "
        "no value, false leaves it out.",
        examples=[{"bb": "capacity=1TB", "spread-job": True}],
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        asking = [key for key in ("gpus_per_node", "gpus_per_task", "gres") if asks_for_gpus(key, values.get(key))]
        found += [
            Conflict(key, f"cannot ask for GPUs beside {asking[0]}: set one of gpus_per_node, gpus_per_task, gres")
            for key in asking[1:]
        ]
        extra = values.get("extra")
        if isinstance(extra, Mapping):
            advised = ((str(flag), extra_advice(str(flag), cls.model_fields)) for flag in extra)
            found += [Conflict(f"extra.{flag}", advice) for flag, advice in advised if advice]
        return found

    def flags(self) -> list[tuple[str, str | None]]:
        """sbatch's long options without dashes and their values (None for a bare one), in a fixed order.

        ``nodes`` and ``ntasks-per-node`` are always there, and a job's ``time``.
        """
        given = {**dict(self), "ntasks_per_node": self.ranks_per_node}
        own = ((name.replace("_", "-"), given[name]) for name in type(self).model_fields if name != "extra")
        return [option for name, value in [*own, *self.extra.items()] for option in _option(name, value)]

    @property
    def min_nodes(self) -> int:
        return quantities.node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        return quantities.node_range(self.nodes)[1]

    @property
    def mem_megabytes(self) -> int | None:
        """Memory of a node in units of 2**20 bytes; None where ``mem`` is not set, 0 for all that a node has."""
        return None if self.mem is None else quantities.memory_megabytes(self.mem)

    @property
    def node_gpus(self) -> int:
        """GPUs that the job gets on each node."""
        if self.gpus_per_node is not None:
            return quantities.gpu_count(self.gpus_per_node)
        if self.gpus_per_task is not None:
            return quantities.gpu_count(self.gpus_per_task) * (self.ntasks_per_node or 1)
        return 0 if self.gres is None else quantities.gres_gpus(self.gres)

    @property
    def ranks_per_node(self) -> int:
        if self.ntasks_per_node is not None:
            return self.ntasks_per_node
        return 1 if self.gpus_per_task is not None else max(self.node_gpus, 1)


def asks_for_gpus(key: str, value: Any) -> bool:
    """Whether a setting, validated or as read, is one of those of which only one may ask for GPUs."""
    if value is None:
        return False
    if key == "gres":
        return any(part.strip().removeprefix("gres:").split(":")[0] == "gpu" for part in str(value).split(","))
    return True


def _option(name: str, value: Any) -> list[tuple[str, str | None]]:
    if value is None or value is False:
        return []
    if name in ("gpus-per-node", "gpus-per-task") and quantities.gpu_count(value) == 0:
        return []
    if value is True:
        return [(name, None)]
    return [(name, str(value))]
