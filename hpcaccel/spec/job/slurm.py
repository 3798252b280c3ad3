"""Slurm settings: resources named as sbatch's options, and further options for sbatch and srun."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.job import quantities
from hpcaccel.spec.job.fields import (
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
    Time,
    Whole,
    Word,
    checked_text,
    text_list,
)
from hpcaccel.spec.job.node_counts import node_range
from hpcaccel.spec.job.quantities import HETEROGENEOUS, OWNED_FLAGS, extra_advice, owned_by_srun
from hpcaccel.spec.yaml12 import PlainScalar

__all__ = ["Resources", "SlurmSection", "SrunSection", "requests_gpus"]


_FLAG_NAME = re.compile(r"[a-z][a-z0-9-]*[a-z0-9]", re.ASCII)


def _exclusive(value: Any) -> Any:
    if isinstance(value, PlainScalar):
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
        raise ValueError("must be a mapping of sbatch option names to values: {bb: capacity=1TB}")
    return {str(key): _extra_value(key, item) for key, item in value.items()}


def _extra_value(key: Any, value: Any) -> str | bool:
    name = str(key)
    if not _FLAG_NAME.fullmatch(name):
        raise ValueError(f"has the key {name!r}: write the long name of an sbatch option without leading dashes")
    if isinstance(value, PlainScalar):
        value = value.value if isinstance(value.value, bool) else value.text
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string or a number, or true for an option without a value")
    try:
        return checked_text(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class Resources(Section):
    """Resources of the ranks or of a component. Keys are sbatch's long option names with '_' instead of '-'."""

    moved: ClassVar[dict[str, str]] = {name.replace("-", "_"): advice for name, advice in OWNED_FLAGS.items()} | {
        "het": HETEROGENEOUS,
        "hetjob": HETEROGENEOUS,
    }
    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("mem", "mem_per_cpu", "mem_per_gpu"),)

    account: Word | None = Field(default=None, description="The account to charge.")
    partition: CommaList | None = Field(
        default=None,
        description="The partition, or several: Slurm uses the one that can start the job first.",
        examples=["gpu"],
    )
    qos: Word | None = Field(default=None, description="The quality of service.")
    reservation: Word | None = Field(default=None, description="A reservation to run in.")
    nodes: Nodes = Field(
        default="1", description="Number of nodes: 4, a range such as 2-4, or a list of sizes.", examples=[1, "2-4"]
    )
    ntasks_per_node: Count | None = Field(
        default=None,
        description="Ranks per node. Default: the number of GPUs per node; 1 without GPUs or with gpus_per_task.",
    )
    cpus_per_task: Count | None = Field(
        default=None, description="CPUs per rank, as Slurm counts them: cores, or hardware threads."
    )
    gpus_per_node: Gpus | None = Field(
        default=None, description="GPUs per node, with or without their type.", examples=[2, "a100:2"]
    )
    gpus_per_task: Gpus | None = Field(
        default=None,
        description="GPUs per rank; requires ntasks_per_node for more than one rank per node. Each rank sees all GPUs "
        "of its node and uses the one of its local rank, unless gpu_bind is set.",
    )
    gres: Gres | None = Field(
        default=None,
        description="Generic resources per node, for sites that require GPU requests in this form.",
        examples=["gpu:a100:2"],
    )
    mem: Memory | None = Field(
        default=None,
        description="Memory per node: 40G, 40000M; without a unit: megabytes; 0: all memory of the node.",
        examples=["40G"],
    )
    mem_per_cpu: Memory | None = Field(
        default=None, description="Memory per CPU, as Slurm counts them, instead of mem."
    )
    mem_per_gpu: Memory | None = Field(default=None, description="Memory per GPU, instead of mem.")
    constraint: Word | None = Field(
        default=None, description="Features that the nodes must have.", examples=["a100&ib"]
    )
    exclude: CommaList | None = Field(default=None, description="Nodes to exclude.", examples=["n[01-03]"])
    nodelist: CommaList | None = Field(default=None, description="Nodes that the job must include.")
    exclusive: Annotated[
        bool | Literal["user", "mcs", "topo"] | None,
        BeforeValidator(lambda value: None if value is None else _exclusive(value)),
        WithJsonSchema({"enum": [True, False, "user", "mcs", "topo", None]}),
    ] = Field(
        default=None, description="true: do not share the nodes with other jobs. user: share only with the same user."
    )
    cores_per_socket: Count | None = Field(
        default=None, description="Only nodes with at least this many cores per socket."
    )
    cpus_per_gpu: Count | None = Field(
        default=None, description="CPUs per GPU, as Slurm counts them, instead of cpus_per_task."
    )
    gpu_bind: Word | None = Field(default=None, description="How ranks are bound to GPUs.", examples=["single:1"])
    hint: Word | None = Field(default=None, description="Binding hints.", examples=["nomultithread"])
    licenses: CommaList | None = Field(default=None, description="Licences that the job needs.")
    network: Word | None = Field(default=None, description="Network requirements, as defined by the site.")
    oversubscribe: Flag | None = Field(default=None, description="Let other jobs share the job's resources.")
    sockets_per_node: Count | None = Field(default=None, description="Only nodes with at least this many sockets.")
    switches: Word | None = Field(
        default=None, description="Maximum number of switches, and how long to wait for it.", examples=["1@10:00"]
    )
    threads_per_core: Natural | None = Field(default=None, description="Threads to use per core.")
    tmp: Memory | None = Field(default=None, description="Temporary disk space per node.")
    extra: Annotated[
        dict[str, str | bool],
        BeforeValidator(_extra),
        WithJsonSchema({"type": ["object", "null"], "additionalProperties": {"type": ["string", "number", "boolean"]}}),
    ] = Field(
        default_factory=dict,
        description="Other sbatch options, by long name without leading dashes; true for an option without a value, "
        "false to omit it.",
        examples=[{"bb": "capacity=1TB", "spread-job": True}],
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        requesting = [key for key in ("gpus_per_node", "gpus_per_task", "gres") if requests_gpus(key, values.get(key))]
        found += [
            Conflict(
                key, f"conflicts with {requesting[0]}: request GPUs with only one of gpus_per_node, gpus_per_task, gres"
            )
            for key in requesting[1:]
        ]
        extra = values.get("extra")
        if isinstance(extra, Mapping):
            advised = ((str(flag), extra_advice(str(flag), cls.model_fields)) for flag in extra)
            found += [Conflict(f"extra.{flag}", advice) for flag, advice in advised if advice]
        return found

    def flags(self) -> list[tuple[str, str | None]]:
        """Pairs of an option's long name, without leading dashes, and its value, in a fixed order. The value is None if
        the option takes none.

        ``nodes``, ``ntasks-per-node`` and a job's ``time`` are always included.
        """
        given = {**dict(self), "ntasks_per_node": self.ranks_per_node}
        own = ((name.replace("_", "-"), given[name]) for name in type(self).model_fields if name != "extra")
        return [option for name, value in [*own, *self.extra.items()] for option in _option(name, value)]

    @property
    def min_nodes(self) -> int:
        return node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        return node_range(self.nodes)[1]

    @property
    def mem_megabytes(self) -> int | None:
        """Memory per node in MiB (2**20 bytes); None if ``mem`` is not set. 0 stands for all memory of the node."""
        return None if self.mem is None else quantities.memory_megabytes(self.mem)

    @property
    def node_gpus(self) -> int:
        """Number of GPUs that the job gets on each node."""
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


def requests_gpus(key: str, value: Any) -> bool:
    """Whether ``value``, validated or not, requests GPUs. ``key`` is ``gpus_per_node``, ``gpus_per_task`` or ``gres``,
    of which at most one may request GPUs. A request for 0 GPUs also counts.
    """
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


class SlurmSection(Resources):
    """Resources and queue. Keys are sbatch's long option names with '_' for '-'."""

    time: Time = Field(
        default="01:00:00",
        description="Time limit of one job: minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes or days-hours:minutes:seconds. A run that needs longer is requeued and continues. "
        "Default: one hour.",
        examples=["04:00:00", "1-00:00:00"],
    )
    time_min: Time | None = Field(
        default=None, description="Minimum time limit: Slurm may lower time down to it to start the job earlier."
    )
    comment: Word | None = Field(default=None, description="A comment that Slurm stores with the job.")
    mail_type: CommaList | None = Field(
        default=None, description="Events for which Slurm sends mail.", examples=["END,FAIL"]
    )
    mail_user: Word | None = Field(default=None, description="Who receives the mail.")
    begin: Word | None = Field(
        default=None, description="Do not start the job before this time.", examples=["now+1hour"]
    )
    clusters: CommaList | None = Field(default=None, description="Clusters of a federation to submit to.")
    deadline: Word | None = Field(default=None, description="Remove the job if it cannot end before this time.")
    dependency: Word | None = Field(
        default=None, description="Start after other jobs.", examples=["afterok:1234", "singleton"]
    )
    nice: Whole | None = Field(default=None, description="Lower the job's priority by this amount.")
    priority: Word | None = Field(default=None, description="The job's priority; only privileged users can set it.")
    wckey: Word | None = Field(default=None, description="The workload characterization key.")

    @property
    def time_seconds(self) -> int | None:
        """The time limit in seconds; None if there is no limit."""
        return quantities.time_seconds(self.time)


class SrunSection(Section):
    """Additional srun flags for starting the ranks."""

    extra: list[Word] = text_list("Additional srun flags, one argument per item, passed unchanged: [--cpu-bind=none].")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        extra = values.get("extra")
        for index, item in enumerate(extra if isinstance(extra, list) else []):
            text = str(item)
            if index == 0 and not text.startswith("-"):
                advice = f"must start with an srun flag, such as --cpu-bind=none, not {text!r}"
                found.append(Conflict("extra.0", advice))
            if flag := owned_by_srun(text):
                found.append(Conflict(f"extra.{index}", f"{text!r} sets --{flag}, which hpcaccel sets itself"))
        return found
