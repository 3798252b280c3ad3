"""Memory of GPUs by the names that Slurm sites give them, and the GPUs of a cluster profile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcaccel.errors import SpecError, UserError
from hpcaccel.launch.environment_report import torch_facts
from hpcaccel.spec.cluster.cluster_facts import NodeType, SiteFacts, load_facts
from hpcaccel.spec.cluster.facts_sections import UNTYPED

__all__ = ["GpuKind", "gpu_kinds", "kind_named", "kinds_of_cluster", "memory_of"]

GIB = 2**30
_GIB_BY_NAME: Sequence[tuple[str, tuple[int, ...]]] = (
    (r"gb300|b300", (288,)), (r"gb200", (186,)), (r"b200", (180,)), (r"gh200", (96, 144)), (r"h200", (141,)),
    (r"h100", (80, 94)), (r"h800", (80,)), (r"h20\b", (96,)), (r"a100", (40, 80, 64)), (r"a800", (80, 40)),
    (r"a30\b", (24,)), (r"a40\b", (48,)), (r"a10\b", (24,)), (r"a16\b", (16,)), (r"l40s?", (48,)), (r"l4\b", (24,)),
    (r"v100", (16, 32)), (r"p100", (16, 12)), (r"t4\b", (16,)), (r"a6000", (48,)), (r"rtx-?6000", (24, 48, 96)),
    (r"a5000", (24,)), (r"a4000", (16,)), (r"4090|3090", (24,)), (r"5090", (32,)), (r"2080", (11,)), (r"k80", (12,)),
    (r"mi355x?", (288,)), (r"mi325x?", (256,)), (r"mi300a", (128,)), (r"mi300x?", (192,)), (r"mi250x?", (64,)),
    (r"mi210", (64,)), (r"mi100", (32,)), (r"max_?-?1550|pvc", (64,)), (r"gaudi3", (128,)), (r"gaudi2", (96,)),
)  # fmt: skip
"""Vendors' figures in GiB; several if there are models with the same name. MI250 and Max 1550: a GPU of Slurm is one of
the two halves."""
_SIZE = re.compile(r"(\d{2,3})\s*(?:g|gb|gib)(?![a-z0-9])", re.IGNORECASE)
_USABLE = 0.98
"""Part of the nominal memory that is assumed to be usable: nvidia-smi reports 81,559 MiB for an H100 of 80 GB, and the
driver keeps some of it."""


@dataclass(frozen=True)
class GpuKind:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    """Memory that programs can allocate."""
    per_node: int | None = None
    """Number on each node; None if unknown."""
    nominal: str = ""
    """The memory as the vendor or the user names it, such as ``80GB``."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.nominal or f'{round(self.memory_bytes / GIB)}GiB'}"


def kind_named(name: str, hints: Iterable[str] = (), *, per_node: int | None = None) -> tuple[GpuKind | None, str]:
    """The kind of GPU with one of Slurm's names, and a note: see :func:`memory_of`."""
    memory, note = memory_of(name, hints)
    return None if memory is None else GpuKind(name, int(memory * _USABLE * GIB), per_node, f"{memory}GB"), note


def memory_of(name: str, hints: Iterable[str] = ()) -> tuple[int | None, str]:
    """The memory in GiB of a GPU with this name, and a note if the name does not determine it.

    Args:
        name: Slurm's type, such as ``a100``, ``nvidia_a100_80gb_pcie`` or ``h100``.
        hints: features of the nodes, which may name the size (``gpu80g``).
    """
    sizes = next((sizes for pattern, sizes in _GIB_BY_NAME if re.search(pattern, name.lower().replace("_", "-"))), ())
    own = [int(found) for found in _SIZE.findall(name)]
    if own:
        return own[0], ""
    if not sizes:
        return None, f"the memory of GPU type {name!r} is not known: give it with --gpu-memory"
    told = [int(found) for hint in hints for found in _SIZE.findall(hint) if int(found) in sizes]
    if told or len(sizes) == 1:
        return (told or list(sizes))[0], ""
    others = " or ".join(f"{one} GiB" for one in sizes[1:])
    return sizes[0], f"{name} with {sizes[0]} GiB is assumed; there are also some with {others} (--gpu-memory)"


def gpu_kinds(nodes: Iterable[NodeType]) -> tuple[list[GpuKind], list[str]]:
    """The kinds of GPUs of these nodes, each once, and notes about those whose memory is not known."""
    found: dict[str, GpuKind] = {}
    notes: list[str] = []
    for node in nodes:
        for name, count in node.gpus.items():
            if count == 0:
                continue
            kind, note = kind_named(name, node.features, per_node=count)
            if name == UNTYPED:
                note = f"nodes {node.name} have GPUs without a type: give their memory with --gpu-memory"
            if note:
                notes.append(note)
            if kind is not None and (kind.label not in found or (found[kind.label].per_node or 0) < count):
                found[kind.label] = kind
    return list(found.values()), list(dict.fromkeys(notes))


def kinds_of_cluster(name: str, partition: str | None = None) -> tuple[list[GpuKind], list[str]]:
    """The kinds of GPUs of a cluster profile, from its stored facts; for ``local``, those that torch sees here.

    Args:
        partition: comma-separated names of partitions; None: the nodes of all partitions.

    Raises:
        SpecError: the profile has not been probed.
        UserError: torch cannot be imported here.
    """
    if name == "local":
        return _kinds_here()
    facts = load_facts(name)
    if facts is None:
        raise SpecError(f"the GPUs of cluster {name!r} are not known: run `hpcaccel cluster probe {name}` first")
    kinds, notes = gpu_kinds(_nodes_of(facts, partition))
    if not kinds and not notes:
        where = f"partition {partition!r} of cluster {name!r}" if partition else f"cluster {name!r}"
        notes = [f"{where} has no GPUs"]
    return kinds, notes


def _nodes_of(facts: SiteFacts, partition: str | None) -> list[NodeType]:
    if partition is None:
        return facts.node_types
    wanted = set(partition.split(","))
    names = {node for one in facts.partitions if one.name in wanted for node in one.node_types}
    return [node for node in facts.node_types if node.name in names]


def _kinds_here() -> tuple[list[GpuKind], list[str]]:
    facts = torch_facts()
    if "problem" in facts:
        raise UserError(f"the GPUs of this machine are not known, because torch cannot be imported: {facts['problem']}")
    sizes = {(one["name"], one["bytes"]) for one in facts["devices"] if one["bytes"]}
    kinds = [GpuKind(name, size, len(facts["devices"])) for name, size in sorted(sizes)]
    return kinds, [] if kinds else ["this machine has no GPUs: give their memory with --gpu-memory"]
