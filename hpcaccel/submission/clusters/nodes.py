"""Checks of what a job requests per node: GPUs, CPUs, memory and features. Enough nodes must have all of these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcaccel.core.formatting import counted, did_you_mean
from hpcaccel.spec import JobSpec
from hpcaccel.spec.cluster.cluster_facts import NodeType, Partition, SiteFacts
from hpcaccel.spec.job.quantities import memory_megabytes
from hpcaccel.spec.job.slurm import SlurmSection
from hpcaccel.submission.clusters.findings import Finding, error, listed

__all__ = ["hardware"]

UNTYPED = "gpu"
"""The name that the facts use for GPUs without a type."""


@dataclass(frozen=True)
class _Request:
    """A resource that the job needs on each node."""

    key: str
    amount_text: str
    """The amount as text: ``8 GPUs``."""
    amount: int
    kind: str = ""
    """The GPU type; "" for any type."""

    def of(self, node: NodeType) -> int:
        if self.key == "mem":
            return node.memory_mb
        if self.key == "cpus":
            return node.cpus
        if not self.kind:
            return node.gpu_count
        return max((count for name, count in node.gpus.items() if name.lower() == self.kind.lower()), default=0)


def hardware(spec: JobSpec, facts: SiteFacts, partitions: Sequence[Partition]) -> Iterator[Finding]:
    """Findings for requests that no node, or too few nodes, in the spec's partitions can fulfil."""
    kinds = [_capped(kind, partitions) for kind in facts.node_types_of([one.name for one in partitions])]
    if not kinds or any(not one.node_types for one in partitions):
        return  # the nodes are unknown
    where = ("partition " if len(partitions) == 1 else "partitions ") + " and ".join(
        repr(one.name) for one in partitions
    )
    fitting = kinds
    if problems := list(_features(spec.slurm.constraint, kinds, where)):
        yield from problems
    else:
        fitting = [one for one in kinds if _has_features(spec.slurm.constraint, one)]
    requests = list(_requests(spec.slurm))
    if missing := [request for request in requests if all(request.of(kind) < request.amount for kind in fitting)]:
        for request in missing:
            yield _too_much(request, spec.slurm, fitting or kinds, where)
        return
    needs = ", ".join([*(request.amount_text for request in requests), *filter(None, [spec.slurm.constraint])])
    able = [kind for kind in fitting if all(request.of(kind) >= request.amount for request in requests)]
    if fitting and not able:
        key = _key_of(requests[0], spec.slurm)
        yield error(key, f"{_value(spec.slurm, key)}: no node in {where} has all of {needs} ({_described(kinds)})")
    elif able and len(able) < len(kinds) and (count := _too_few(able, spec.slurm.min_nodes)):
        yield error(
            "slurm.nodes",
            f"{spec.slurm.nodes} is more than the number of nodes in {where} that have {needs} ({count}): set "
            f"slurm.nodes to {count}",
        )


def _too_few(able: Sequence[NodeType], wanted: int) -> int | None:
    """The number of ``able`` nodes, if it is known and too small, else None."""
    count = sum(kind.count for kind in able)
    return count if count < wanted and all(kind.count for kind in able) else None


def _capped(kind: NodeType, partitions: Sequence[Partition]) -> NodeType:
    """``kind`` with only the CPUs and memory that a job in these partitions may use (MaxCPUsPerNode, MaxMemPerNode)."""
    cpus = [one.max_cpus_per_node for one in partitions]
    memory = [one.max_mem_per_node_mb for one in partitions]
    most_cpus = max((most for most in cpus if most), default=0) if all(cpus) else 0
    most_memory = max((most for most in memory if most), default=0) if all(memory) else 0
    capped = {
        "cpus": min(kind.cpus, most_cpus or kind.cpus),
        "memory_mb": min(kind.memory_mb, most_memory or kind.memory_mb),
    }
    return kind.model_copy(update=capped)


def _requests(slurm: SlurmSection) -> Iterator[_Request]:
    for kind, count in _gpus(slurm):
        yield _Request("gpus", counted(count, f"{kind} GPU" if kind else "GPU"), count, kind)
    cpus = _cpus(slurm)
    yield _Request("cpus", counted(cpus, "CPU"), cpus)
    if memory := _memory(slurm, cpus):
        yield _Request("mem", f"{_size(memory)} of memory", memory)


def _gpus(slurm: SlurmSection) -> list[tuple[str, int]]:
    """The GPUs that the job requests per node, as pairs of type and number; the type is "" for any type."""
    if slurm.gpus_per_node is not None:
        text, times = slurm.gpus_per_node, 1
    elif slurm.gpus_per_task is not None:
        text, times = slurm.gpus_per_task, slurm.ranks_per_node
    else:
        parts = [part.split(":") for part in (slurm.gres or "").split(",")]
        text = ",".join(":".join(part[1:]) for part in parts if part[0] == "gpu" and part[-1].isdigit())
        times = 1
    found = []
    for part in filter(None, text.split(",")):
        kind, _, count = part.rpartition(":")
        if int(count):
            found.append((kind, int(count) * times))
    return found


def _cpus(slurm: SlurmSection) -> int:
    """The minimum number of CPUs that the job needs on a node; each rank needs at least one."""
    if slurm.cpus_per_gpu is not None and slurm.node_gpus:
        return slurm.cpus_per_gpu * slurm.node_gpus
    return slurm.ranks_per_node * (slurm.cpus_per_task or 1)


def _memory(slurm: SlurmSection, cpus: int) -> int:
    """The memory that the job needs on a node, in MiB; 0 if it requests none, or all memory of the node."""
    if slurm.mem is not None:
        return memory_megabytes(slurm.mem)
    if slurm.mem_per_cpu is not None:
        return memory_megabytes(slurm.mem_per_cpu) * cpus
    if slurm.mem_per_gpu is not None:
        return memory_megabytes(slurm.mem_per_gpu) * slurm.node_gpus
    return 0


def _key_of(request: _Request, slurm: SlurmSection) -> str:
    """The key of the setting that requests the resource."""
    by_request = {
        "gpus": ("gpus_per_node", "gpus_per_task", "gres"),
        "mem": ("mem", "mem_per_cpu", "mem_per_gpu"),
        "cpus": ("cpus_per_task", "ntasks_per_node", "gpus_per_node", "gres"),
    }
    names = by_request[request.key]
    if request.key == "cpus" and slurm.cpus_per_gpu is not None and slurm.node_gpus:
        return "slurm.cpus_per_gpu"  # without GPUs it requests nothing
    return "slurm." + next((name for name in names if getattr(slurm, name) is not None), names[0])


def _too_much(request: _Request, slurm: SlurmSection, kinds: Sequence[NodeType], where: str) -> Finding:
    key = _key_of(request, slurm)
    most = max(request.of(kind) for kind in kinds)
    requested = f"{_value(slurm, key)} requests {request.amount_text} per node"
    if request.kind and most == 0:
        types = sorted({name for kind in kinds for name in kind.gpus if name != UNTYPED})
        known = listed(types) if types else "(its GPUs have no type: omit the type)"
        has = "has" if where.startswith("partition ") else "have"
        return error(key, f"{requested}, but {where} {has} no such GPUs {known}{did_you_mean(request.kind, types)}")
    if request.key == "gpus" and most == 0:
        return error(key, f"{requested}, but no node in {where} has GPUs: use a partition that has some")
    has = _size(most) if request.key == "mem" else counted(most, "GPU" if request.key == "gpus" else "CPU")
    return error(key, f"{requested}, but no node in {where} has more than {has}: request at most {has}")


def _value(slurm: SlurmSection, key: str) -> str:
    """The value of a setting such as ``slurm.mem``, for a message."""
    value = getattr(slurm, key.partition(".")[2])
    return "(default)" if value is None else str(value)


def _size(megabytes: int) -> str:
    return f"{megabytes / 1024:.4g}G" if megabytes >= 1024 else f"{megabytes}M"


def _described(kinds: Sequence[NodeType]) -> str:
    return "; ".join(f"{one.count} × {one.name}" for one in kinds)


# -- features -----------------------------------------------------------------------------------------------------

_FEATURE = re.compile(r"[\w.:=+/-]+")


def _features(constraint: str | None, kinds: Sequence[NodeType], where: str) -> Iterator[Finding]:
    """Errors for features that no node has, and an error if each feature exists but no node has all of them."""
    if constraint is None:
        return
    known = sorted({name for kind in kinds for name in kind.features})
    wanted = _names(constraint)
    for name in wanted:
        if name not in known:
            yield error(
                "slurm.constraint",
                f"{constraint!r}: no node in {where} has feature {name!r} {listed(known, 'features')}"
                f"{did_you_mean(name, known)}",
            )
    if set(wanted) <= set(known) and not any(_has_features(constraint, kind) for kind in kinds):
        yield error(
            "slurm.constraint",
            f"{constraint!r}: no node in {where} has all of the features {', '.join(wanted)} ({_described(kinds)})",
        )


def _names(constraint: str) -> list[str]:
    """The features of an expression such as ``a100&ib`` or ``[rack1*2&rack2*4]``, without counts."""
    without_counts = re.sub(r"\*\d+", "", constraint)
    return list(dict.fromkeys(_FEATURE.findall(without_counts)))


def _has_features(constraint: str | None, kind: NodeType) -> bool:
    """Whether a node has all features of a constraint such as a&b. True for other operators, which are not checked."""
    if constraint is None or not re.fullmatch(r"[\w.:=+/&,-]+", constraint):
        return True
    return set(_names(constraint)) <= set(kind.features)
