"""Nodes that a run keeps away from: the evidence against each, for how long, and how many at a time.

Slurm excludes nodes for waiting jobs only. How that works for a job that runs stands in ``SlurmAllocation.requeue``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.records import ExcludedNode, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir, read_json, write_json
from hpcaccel.node.allocation import Allocation
from hpcaccel.node.launch_spec import Launch, Resilience

__all__ = ["Exclusions", "Placement"]

TRIES = 1
"""How often a job that starts on an excluded node goes back into the queue for it: Slurm may not let us exclude any."""


@dataclass
class Exclusions:
    """All nodes that were ever excluded, as read from ``excluded_nodes.json``, and the only writer of new ones."""

    run: RunDir
    limits: Resilience
    nodes: list[ExcludedNode]

    @classmethod
    def read(cls, run: RunDir, limits: Resilience) -> Exclusions:
        document: dict[str, Any] = read_json(run.excluded_nodes) or {}
        return cls(run, limits, [from_dict(ExcludedNode, value) for value in document.get("nodes", [])])

    def active(self) -> list[str]:
        """The nodes to keep away from at this moment."""
        now = time.time()
        return sorted({one.node for one in self.nodes if one.expires > now})

    def ever(self) -> list[str]:
        return sorted({one.node for one in self.nodes})

    def room_for(self, nodes: Sequence[str]) -> list[str]:
        """As many of ``nodes`` as ``resilience.max_excluded`` allows."""
        active = self.active()
        new = [node for node in nodes if node not in active]
        return new[: max(0, self.limits.max_excluded - len(active))]

    def add(self, nodes: Sequence[str], *, why: str, detail: str, attempt: int) -> None:
        now = time.time()
        expires = now + self.limits.exclude_hours * 3600
        self.nodes += [
            ExcludedNode(node=node, why=why, detail=detail, time=now, attempt=attempt, expires=expires)
            for node in nodes
        ]
        self._write()

    def worth_another_try(self, nodes: Sequence[str]) -> bool:
        """Whether a job that has started on these excluded nodes should go back into the queue; counts the tries."""
        found = [one for one in self.nodes if one.node in nodes and one.expires > time.time()]
        if any(one.tries >= TRIES for one in found):
            return False
        for one in found:
            self.nodes[self.nodes.index(one)] = dataclasses.replace(one, tries=one.tries + 1)
        self._write()
        return True

    def _write(self) -> None:
        write_json(self.run.excluded_nodes, {"version": 1, "nodes": [to_dict(one) for one in self.nodes]})


class Placement:
    """On which nodes of an allocation the ranks go, and which ones the run could do without."""

    def __init__(self, run: RunDir, launch: Launch, allocation: Allocation) -> None:
        self._launch = launch
        self._allocation = allocation
        self._exclusions = Exclusions.read(run, launch.resilience)

    @property
    def nodes(self) -> list[str]:
        """Where the ranks go: the first nodes that are not excluded, or all if these are too few."""
        good = self._good()
        return good[: self._launch.nodes] if len(good) >= self._launch.nodes else self._allocation.nodes

    @property
    def others(self) -> list[str]:
        """Nodes of the allocation that srun would else choose."""
        return [node for node in self._allocation.nodes if node not in self.nodes]

    def misplaced(self) -> list[str]:
        """Nodes that the ranks would go to though they are excluded."""
        active = self._exclusions.active()
        return [node for node in self.nodes if node in active]

    def worth_leaving(self, nodes: Sequence[str]) -> bool:
        """Whether the job should go back into the queue for these nodes, which are excluded; counts the tries."""
        if not self._launch.resilience.requeue:
            return False
        return bool(self._dispensable(nodes)) and self._exclusions.worth_another_try(nodes)

    def excludable(self, blamed: Sequence[str]) -> tuple[tuple[str, ...], bool]:
        """Those of the nodes to blame that may be excluded; and whether the allocation has enough without them."""
        blamed = self._exclusions.room_for(blamed)
        if not blamed:
            return (), False
        # What environment.setup_per_node does was done on the first nodes only.
        if not self._launch.setup_per_node and len(self._good(but=blamed)) >= self._launch.nodes:
            return tuple(blamed), True
        return tuple(self._dispensable(blamed)), False

    def exclude(self, nodes: Sequence[str], *, why: str, detail: str, attempt: int) -> None:
        self._exclusions.add(nodes, why=why, detail=detail, attempt=attempt)

    def tell_scheduler(self, *, now: bool = False) -> None:
        """See ``Allocation.avoid``."""
        self._allocation.avoid(self._exclusions.active(), instead_of=self._exclusions.ever(), now=now)

    def _good(self, *, but: Sequence[str] = ()) -> list[str]:
        out = {*but, *self._exclusions.active()}
        return [node for node in self._allocation.nodes if node not in out]

    def _dispensable(self, nodes: Sequence[str]) -> list[str]:
        beside = sum(one.nodes for one in self._launch.components)  # they may need nodes of the same partition
        return self._allocation.dispensable(nodes, needed=self._launch.nodes + beside)
