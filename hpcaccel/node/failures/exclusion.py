"""Excluded nodes of a run: the reason for each, its expiry, and the limit on their number.

Slurm can change a job's excluded nodes only while the job is pending. The comment in ``SlurmAllocation.requeue``
explains how a running job excludes nodes from its next start.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.core.records import ExcludedNode, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import Allocation

__all__ = ["Exclusions", "Placement"]

TRIES = 1
"""How often a job is requeued because it started on an excluded node. Slurm may refuse to exclude a node."""


@dataclass
class Exclusions:
    """All nodes that were ever excluded, read from ``excluded_nodes.json``. Only this class writes that file."""

    run: RunDir
    limits: RestartPolicy
    nodes: list[ExcludedNode]

    @classmethod
    def read(cls, run: RunDir, limits: RestartPolicy) -> Exclusions:
        document: dict[str, Any] = read_json(run.excluded_nodes) or {}
        return cls(run, limits, [from_dict(ExcludedNode, value) for value in document.get("nodes", [])])

    def active(self) -> list[str]:
        """The nodes whose exclusion has not expired."""
        now = time.time()
        return sorted({one.node for one in self.nodes if one.expires > now})

    def ever(self) -> list[str]:
        return sorted({one.node for one in self.nodes})

    def room_for(self, nodes: Sequence[str]) -> list[str]:
        """The ``nodes`` that are not excluded now and can be excluded without exceeding ``max_excluded``."""
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
        """Whether to requeue a job that has started on these excluded nodes. If so, records the requeue as a try."""
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
    """Chooses which nodes of the allocation the ranks use, and which nodes the run may exclude."""

    def __init__(self, run: RunDir, launch: LaunchSpec, allocation: Allocation) -> None:
        self._launch = launch
        self._allocation = allocation
        self._exclusions = Exclusions.read(run, launch.resilience)
        self._first_nodes = list(allocation.nodes)

    @property
    def nodes(self) -> list[str]:
        """The nodes for the ranks: the first ones that are not excluded, or all nodes if these are too few."""
        good = self._good()
        size = self._launch.size_for(len(good))
        return list(self._allocation.nodes) if size is None else good[:size]

    @property
    def others(self) -> list[str]:
        """Nodes of the allocation that srun must not choose. They include nodes that the job has lost: they are
        still in the environment of the batch step, and srun would request a step on them (22.05)."""
        return [node for node in self._first_nodes if node not in self.nodes]

    @property
    def is_complete(self) -> bool:
        """Whether the allocation has enough nodes for the ranks, excluded ones included. It may have lost some."""
        return self._launch.size_for(len(self._allocation.nodes)) is not None

    @property
    def has_lost_nodes(self) -> bool:
        """Whether the job has lost a node. Slurm then keeps the CPUs and GPUs of the steps that had a part there, even
        after these steps have ended (22.05)."""
        return bool(self.lost(self._first_nodes))

    def lost(self, nodes: Sequence[str]) -> list[str]:
        """Those of ``nodes`` that the job has lost."""
        return [node for node in nodes if node not in self._allocation.nodes]

    def misplaced(self) -> list[str]:
        """Excluded nodes that the ranks would use, because too few other nodes are left."""
        active = self._exclusions.active()
        return [node for node in self.nodes if node in active]

    def worth_leaving(self, nodes: Sequence[str]) -> bool:
        """Whether to requeue the job because it has started on these excluded nodes. If so, records the requeue."""
        if not self._launch.resilience.requeue:
            return False
        return bool(self._dispensable(nodes)) and self._exclusions.worth_another_try(nodes)

    def excludable(self, blamed: Sequence[str]) -> tuple[tuple[str, ...], bool]:
        """Returns the blamed nodes that may be excluded, and whether the allocation has enough nodes without these."""
        blamed = self._exclusions.room_for(blamed)
        if not blamed:
            return (), False
        # environment.setup_per_node may have run on the first nodes only: the ranks cannot move to the others then.
        can_move = self._launch.resilience.outlives_nodes or not self._launch.setup_per_node
        if can_move and self._launch.size_for(len(self._good(but=blamed))) is not None:
            return tuple(blamed), True
        return tuple(self._dispensable(blamed)), False

    def exclude(self, nodes: Sequence[str], *, why: str, detail: str, attempt: int) -> None:
        self._exclusions.add(nodes, why=why, detail=detail, attempt=attempt)

    def update_scheduler(self, *, now: bool = False) -> None:
        """Pass the excluded nodes to the scheduler, see ``Allocation.avoid``."""
        self._allocation.avoid(self._exclusions.active(), instead_of=self._exclusions.ever(), now=now)

    def _good(self, *, but: Sequence[str] = ()) -> list[str]:
        out = {*but, *self._exclusions.active()}
        return [node for node in self._allocation.nodes if node not in out]

    def _dispensable(self, nodes: Sequence[str]) -> list[str]:
        beside = sum(one.nodes for one in self._launch.components)  # components may need nodes of the same partition
        return self._allocation.dispensable(nodes, needed=self._launch.nodes + beside)
