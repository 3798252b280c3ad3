"""What a job asks of one node: GPUs, CPUs, memory, features. Some kind of node must have all of it, and be there often
enough."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcaccel.spec import JobSpec
from hpcaccel.spec.quantities import memory_megabytes
from hpcaccel.spec.site import NodeType, Partition, SiteFacts
from hpcaccel.spec.slurm import Slurm
from hpcaccel.submission.site.findings import Finding, error, listed, nearest

__all__ = ["hardware"]

UNTYPED = "gpu"
"""How the facts call GPUs that a site gave no type."""


@dataclass(frozen=True)
class _Wish:
    """One thing that a node must have."""

    key: str
    asked: str
    """In words: ``8 GPUs``."""
    has: str
    """What the best node has, in words with {0}."""
    amount: int
    kind: str = ""
    """Of GPUs: their type."""

    def of(self, node: NodeType) -> int:
        if self.key == "mem":
            return node.memory_mb
        if self.key == "cpus":
            return node.cpus
        if not self.kind:
            return node.gpu_count
        return max((count for name, count in node.gpus.items() if name.lower() == self.kind.lower()), default=0)


def hardware(spec: JobSpec, facts: SiteFacts, partitions: Sequence[Partition]) -> Iterator[Finding]:
    """What no kind of node of the spec's partitions can give."""
    kinds = [_capped(kind, partitions) for kind in facts.node_types_of([one.name for one in partitions])]
    if not kinds or any(not one.node_types for one in partitions):
        return  # what nodes there are is not known
    where = "partition " + " and ".join(repr(one.name) for one in partitions)
    fitting = kinds
    if problems := list(_features(spec.slurm.constraint, kinds, where)):
        yield from problems
    else:
        fitting = [one for one in kinds if _has_features(spec.slurm.constraint, one)]
    wishes = list(_wishes(spec.slurm))
    if missing := [wish for wish in wishes if all(wish.of(kind) < wish.amount for kind in fitting)]:
        for wish in missing:
            yield _too_much(wish, spec.slurm, fitting or kinds, where)
        return
    able = [kind for kind in fitting if all(wish.of(kind) >= wish.amount for wish in wishes)]
    if fitting and not able:
        together = ", ".join(wish.asked for wish in wishes)
        yield error(
            _key_of(wishes[0], spec.slurm),
            f"{together}: no node of {where} has all of it together ({_described(kinds)})",
        )
    elif able and len(able) < len(kinds) and (count := _too_few(able, spec.slurm.min_nodes)):
        yield error(
            "slurm.nodes",
            f"{spec.slurm.nodes} is more than there are nodes in {where} with what is asked for "
            f"({', '.join(wish.asked for wish in wishes) or 'that constraint'}; there are {count}): set slurm.nodes to "
            f"{count}",
        )


def _too_few(able: Sequence[NodeType], wanted: int) -> int | None:
    """How many there are, where that is known and less; that a whole partition has too few is said of the partition."""
    count = sum(kind.count for kind in able)
    return count if count < wanted and all(kind.count for kind in able) else None


def _capped(kind: NodeType, partitions: Sequence[Partition]) -> NodeType:
    """A node as far as a job of these partitions may use it (MaxCPUsPerNode, MaxMemPerNode)."""
    cpus = [one.max_cpus_per_node for one in partitions]
    memory = [one.max_mem_per_node_mb for one in partitions]
    most_cpus = max((most for most in cpus if most), default=0) if all(cpus) else 0
    most_memory = max((most for most in memory if most), default=0) if all(memory) else 0
    capped = {
        "cpus": min(kind.cpus, most_cpus or kind.cpus),
        "memory_mb": min(kind.memory_mb, most_memory or kind.memory_mb),
    }
    return kind.model_copy(update=capped)


def _wishes(slurm: Slurm) -> Iterator[_Wish]:
    for kind, count in _gpus(slurm):
        yield _Wish("gpus", f"{count} {kind + ' ' if kind else ''}GPUs", "{0} GPUs", count, kind)
    cpus = _cpus(slurm)
    yield _Wish("cpus", f"{cpus} CPUs", "{0} CPUs", cpus)
    if memory := _memory(slurm, cpus):
        yield _Wish("mem", f"{_size(memory)} of memory", "{0}", memory)


def _gpus(slurm: Slurm) -> list[tuple[str, int]]:
    """GPUs of a node by type, "" for any type."""
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


def _cpus(slurm: Slurm) -> int:
    """The fewest CPUs of a node that the job can do with; each rank has one at least."""
    if slurm.cpus_per_gpu is not None and slurm.node_gpus:
        return slurm.cpus_per_gpu * slurm.node_gpus
    return slurm.ranks_per_node * (slurm.cpus_per_task or 1)


def _memory(slurm: Slurm, cpus: int) -> int:
    """Megabytes of a node; 0 where nothing, or all that there is, is asked for."""
    if slurm.mem is not None:
        return memory_megabytes(slurm.mem)
    if slurm.mem_per_cpu is not None:
        return memory_megabytes(slurm.mem_per_cpu) * cpus
    if slurm.mem_per_gpu is not None:
        return memory_megabytes(slurm.mem_per_gpu) * slurm.node_gpus
    return 0


def _key_of(wish: _Wish, slurm: Slurm) -> str:
    """The setting that asks for it."""
    by_wish = {
        "gpus": ("gpus_per_node", "gpus_per_task", "gres"),
        "mem": ("mem", "mem_per_cpu", "mem_per_gpu"),
        "cpus": ("cpus_per_gpu", "cpus_per_task", "ntasks_per_node"),
    }
    names = by_wish[wish.key]
    return "slurm." + next((name for name in names if getattr(slurm, name) is not None), names[0])


def _too_much(wish: _Wish, slurm: Slurm, kinds: Sequence[NodeType], where: str) -> Finding:
    key = _key_of(wish, slurm)
    value = getattr(slurm, key.partition(".")[2])
    most = max(wish.of(kind) for kind in kinds)
    asked = f"{value} asks for {wish.asked} of a node"
    if wish.kind and most == 0:
        types = sorted({name for kind in kinds for name in kind.gpus if name != UNTYPED})
        known = listed(types) if types else "(its GPUs have no types: leave the type out)"
        return error(key, f"{asked}, and {where} has no such GPUs {known}{nearest(wish.kind, types)}")
    has = _size(most) if wish.key == "mem" else wish.has.format(most)
    return error(key, f"{asked}, and no node of {where} has more than {has}: ask for at most {has}")


def _size(megabytes: int) -> str:
    return f"{megabytes / 1024:.4g}G" if megabytes >= 1024 else f"{megabytes}M"


def _described(kinds: Sequence[NodeType]) -> str:
    return "; ".join(f"{one.count} × {one.name}" for one in kinds)


# -- features -----------------------------------------------------------------------------------------------------

_FEATURE = re.compile(r"[\w.:=+/-]+")


def _features(constraint: str | None, kinds: Sequence[NodeType], where: str) -> Iterator[Finding]:
    """Features that no node has, and sets of them that no node has together."""
    if constraint is None:
        return
    known = sorted({name for kind in kinds for name in kind.features})
    wanted = _names(constraint)
    for name in wanted:
        if name not in known:
            yield error(
                "slurm.constraint",
                f"{constraint!r}: no node of {where} has {name!r} {listed(known)}{nearest(name, known)}",
            )
    if set(wanted) <= set(known) and not any(_has_features(constraint, kind) for kind in kinds):
        yield error(
            "slurm.constraint",
            f"{constraint!r}: no node of {where} has all of {', '.join(wanted)} ({_described(kinds)})",
        )


def _names(constraint: str) -> list[str]:
    """The features of an expression such as ``a100&ib``, ``[rack1*2&rack2*4]``; counts are no features."""
    without_counts = re.sub(r"\*\d+", "", constraint)
    return list(dict.fromkeys(_FEATURE.findall(without_counts)))


def _has_features(constraint: str | None, kind: NodeType) -> bool:
    """Whether a node may serve, as far as a plain a&b tells; other forms speak of several nodes together."""
    if constraint is None or not re.fullmatch(r"[\w.:=+/&,-]+", constraint):
        return True
    return set(_names(constraint)) <= set(kind.features)
