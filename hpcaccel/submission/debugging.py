"""``submit --debug``: one node, a short time, and the site's partition or QOS for such jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcaccel.spec import JobSpec
from hpcaccel.spec.quantities import canonical_time
from hpcaccel.spec.site import Partition, SiteFacts
from hpcaccel.submission.site.accounts import effective_account, groups

__all__ = ["DEBUG_MINUTES", "DebugJob", "debug_job"]

DEBUG_MINUTES = 15
_NAMES = ("debug", "devel", "develop", "dev", "test", "testing", "short", "interactive")
"""How sites call what is meant for trying things out, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class DebugJob:
    """The settings that make a job of a spec one for debugging."""

    overrides: tuple[str, ...]
    where: str
    """In words: the site's place for such jobs, or why the spec's own stays."""

    def note(self, spec: JobSpec) -> str:
        """What to tell of ``spec``, which has these settings and the user's own on top."""
        back = "" if spec.resilience.requeue or spec.resilience.chain else "; it does not come back through the queue"
        nodes = "one node" if spec.slurm.nodes in (None, "1") else f"{spec.slurm.nodes} nodes"
        if spec.components:
            nodes += f" and those of {', '.join(spec.components)}"
        return f"debugging: {nodes}, at most {spec.slurm.time}, {self.where}{back}"


def debug_job(spec: JobSpec, facts: SiteFacts | None) -> DebugJob:
    """One node, at most a quarter of an hour, not requeued, under ``<name>-debug``.

    The partition is the facts' own for debugging, else a QOS of that kind is taken, else the spec's stay.
    """
    minutes = _minutes(spec)
    place: list[str] = []
    partition = None if facts is None else _partition(spec, facts)
    qos = None if facts is None or partition is not None else _qos(spec, facts)
    if partition is not None:
        place = [f"slurm.partition={partition.name}", "slurm.qos=null"]
        minutes = min(minutes, partition.max_time_minutes or minutes)
        where = f"partition {partition.name}"
    elif qos is not None:
        assert facts is not None
        place, where = [f"slurm.qos={qos}"], f"QOS {qos}"
        found = facts.qos_named(qos)
        minutes = min(minutes, (found and found.max_wall_minutes) or minutes)
    else:
        stored = "no facts of this cluster are stored: hpcaccel cluster probe"
        why = stored if facts is None else "the cluster's facts name no partition or QOS for debugging"
        where = f"where the spec says ({why})"
    settings = [
        f"name={spec.name[:58]}-debug",
        "slurm.nodes=1",
        "slurm.nodelist=null",
        "slurm.time_min=null",
        f"slurm.time={canonical_time(str(minutes))}",
        "resilience.requeue=false",
        "resilience.chain=null",
        "resilience.restart_in_place=0",
    ]
    for name in spec.components:
        settings += [f"components.{name}.{key}" for key in ("slurm.nodes=1", "slurm.nodelist=null", *place)]
    return DebugJob(overrides=(*settings, *place), where=where)


def _minutes(spec: JobSpec) -> int:
    seconds = spec.slurm.time_seconds
    return DEBUG_MINUTES if seconds is None else max(1, min(DEBUG_MINUTES, seconds // 60))


def _partition(spec: JobSpec, facts: SiteFacts) -> Partition | None:
    """The first partition whose name says so, that is up and lets the job in."""
    let_in = [
        one
        for one in facts.partitions
        if one.state.upper() == "UP"
        and not one.root_only
        and one.min_nodes <= 1
        and not list(_closed(spec, facts, one))
    ]
    by_name = {name: one for one in let_in for name in [one.name]}
    name = _first_of_its_kind(list(by_name))
    return None if name is None else by_name[name]


def _closed(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Sequence[object]:
    without_qos = spec.model_copy(update={"slurm": spec.slurm.model_copy(update={"qos": None})})
    return list(groups(without_qos, facts, partition))


def _qos(spec: JobSpec, facts: SiteFacts) -> str | None:
    account = effective_account(spec, facts)
    return None if account is None else _first_of_its_kind(account.qos)


def _first_of_its_kind(names: Sequence[str]) -> str | None:
    for kind in _NAMES:
        for name in names:
            if kind in re.split(r"[^a-z]+", name.lower()):
                return name
    return None
