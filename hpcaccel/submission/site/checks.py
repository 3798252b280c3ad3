"""A job spec held against the stored facts of its cluster, offline: what Slurm would refuse, or never start.

What the facts do not say is no mistake: a limit that is unknown limits nothing, and a list that could not be read
forbids nothing. A job may name several partitions, of which Slurm takes the first that fits (sbatch(1)): what only some
of them forbid is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import SpecError
from hpcaccel.spec import ClusterProfile, JobSpec
from hpcaccel.spec.component_fields import ComponentSlurm
from hpcaccel.spec.site import Partition, SiteFacts, load_facts
from hpcaccel.submission.site.accounts import accounts, groups
from hpcaccel.submission.site.findings import Finding, error, listed, located, nearest, warning, with_age
from hpcaccel.submission.site.last_run import History, read_history
from hpcaccel.submission.site.limits import array_size, job_limits, partition_limits
from hpcaccel.submission.site.nodes import hardware
from hpcaccel.submission.site.preemption import preemption
from hpcaccel.submission.site.quota import storage

__all__ = ["advice_or_refusal", "check_site", "findings_for", "wanted_partitions", "way_out"]


def findings_for(
    spec: JobSpec, profile: ClusterProfile | None, *, array_tasks: int | None = None, runs_dir: Path | None = None
) -> tuple[SiteFacts | None, list[Finding]]:
    """The stored facts of a profile and what they say; None and nothing where there are none.

    Raises:
        SpecError: the facts cannot be read.
    """
    facts = None if profile is None or profile.backend == "local" else load_facts(profile.name)
    if profile is None or facts is None:
        return None, []
    runs = runs_dir or default_runs_dir(profile.runs_dir)
    history = read_history(spec.name, runs)
    return facts, check_site(spec, facts, array_tasks=array_tasks, runs_dir=runs, history=history)


def advice_or_refusal(
    spec: JobSpec,
    profile: ClusterProfile | None,
    *,
    array_tasks: int | None = None,
    runs_dir: Path | None = None,
    can_leave_aside: bool = True,
) -> tuple[str, ...] | None:
    """The warnings of :func:`findings_for` as sentences; None where there are no facts.

    Args:
        can_leave_aside: the command knows --no-facts.

    Raises:
        SpecError: with every error, and what to do where the facts are out of date.
    """
    facts, found = findings_for(spec, profile, array_tasks=array_tasks, runs_dir=runs_dir)
    if facts is None:
        return None
    if any(one.is_error for one in found):
        wrong = [str(one) for one in found if one.is_error]
        raise SpecError(wrong, hints=[way_out(facts, can_leave_aside=can_leave_aside)])
    return tuple(str(one) for one in found)


def way_out(facts: SiteFacts, *, can_leave_aside: bool = True) -> str:
    """What to do where the cluster has changed since it was probed."""
    aside = ", or leave its facts aside with --no-facts" if can_leave_aside else ""
    name = facts.name
    return f"if cluster {name} has changed since, read it anew with `hpcaccel cluster probe {name}`{aside}"


def check_site(
    spec: JobSpec,
    facts: SiteFacts,
    *,
    array_tasks: int | None = None,
    runs_dir: Path | None = None,
    history: History | None = None,
    now: float | None = None,
    with_ages: bool = True,
) -> list[Finding]:
    """Everything that the facts have to say against ``spec``, errors first.

    Args:
        array_tasks: how many tasks the array has, None for a single job.
        runs_dir: where checkpoints will lie, as the cluster names it; None: not known.
        history: what the last run of that name has measured.
        now: seconds since 1970, for the age of the facts.
        with_ages: name that age in each finding.
    """
    if spec.slurm.clusters not in (None, facts.config.cluster_name):
        return []  # the facts are of another cluster of the federation
    found = [
        *_of_nodes(spec, facts),
        *array_size(spec, facts, array_tasks),
        *storage(spec, facts, runs_dir=runs_dir, history=history),
        *preemption(spec, facts, wanted_partitions(spec, facts), history=history),
        *_of_components(spec, facts, history),
    ]
    ordered = sorted(found, key=lambda one: not one.is_error)
    return located([with_age(one, facts, now) for one in ordered] if with_ages else ordered, spec)


def _of_nodes(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    yield from _unknown_partitions(spec, facts)
    yield from accounts(spec, facts)
    yield from _by_partition(spec, facts)
    yield from job_limits(spec, facts)
    yield from hardware(spec, facts, wanted_partitions(spec, facts))


def _of_components(spec: JobSpec, facts: SiteFacts, history: History | None) -> Iterator[Finding]:
    """The same for the nodes of each component; Slurm preempts all of a job with any of its parts."""
    for name in spec.components:
        alone = spec.of_component(name)
        found = [*_of_nodes(alone, facts)]
        if alone.slurm.partition != spec.slurm.partition:
            found += preemption(alone, facts, wanted_partitions(alone, facts), history=history)
        for one in found:
            yield replace(one, key=_in_component(one.key, name), message=_in_component(one.message, name))
    yield from _too_many_together(spec, facts)


def _in_component(text: str, name: str) -> str:
    """``slurm.nodes`` of a component alone as its file has it; what is the whole job's (``slurm.time``) stays."""
    keys = "|".join(ComponentSlurm.model_fields)
    return re.sub(rf"\bslurm\.(?:{keys})\b", lambda match: f"components.{name}.{match[0]}", text)


def _too_many_together(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """Slurm's backfill scheduler wants each part of such a job on nodes of its own, however few of their CPUs it takes
    (https://slurm.schedmd.com/heterogeneous_jobs.html, "Limitations"; on 22.05 it waited for ever).
    """
    wanted: dict[str, int] = {}
    for one in [spec, *(spec.of_component(name) for name in spec.components)] if spec.components else ():
        if len(partitions := wanted_partitions(one, facts)) == 1:
            wanted[partitions[0].name] = wanted.get(partitions[0].name, 0) + one.slurm.min_nodes
    for name, nodes in wanted.items():
        partition = facts.partition(name)
        if partition is not None and 0 < partition.nodes < nodes:
            yield error(
                "components",
                f"and the ranks need {nodes} nodes of partition {name!r} at the same time, and it has "
                f"{partition.nodes}: ask for fewer, or for a component in another partition",
            )


def wanted_partitions(spec: JobSpec, facts: SiteFacts) -> list[Partition]:
    """Those of the spec that there are; without any, the cluster's default."""
    if spec.slurm.partition is None:
        return [] if facts.default_partition is None else [facts.default_partition]
    found = (facts.partition(name) for name in spec.slurm.partition.split(","))
    return [one for one in found if one is not None]


def _unknown_partitions(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    known = [one.name for one in facts.partitions]
    if not known or spec.slurm.partition is None:
        return
    for name in spec.slurm.partition.split(","):
        if name not in known:
            yield error(
                "slurm.partition",
                f"{name!r} is not on cluster {facts.name!r} {listed(known)}{nearest(name, known)}",
            )


def _by_partition(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """Errors of each partition; warnings where another one of the spec's takes the job."""
    partitions = wanted_partitions(spec, facts)
    found = {one.name: list(_of_partition(spec, facts, one)) for one in partitions}
    one_is_free = any(not any(finding.is_error for finding in own) for own in found.values())
    for own in found.values():
        for finding in own:
            yield warning(finding.key, finding.message) if one_is_free else finding


def _of_partition(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Iterator[Finding]:
    yield from _state(partition)
    yield from groups(spec, facts, partition)
    yield from partition_limits(spec, facts, partition)


def _state(partition: Partition) -> Iterator[Finding]:
    if partition.state.upper() != "UP":
        what = {"DOWN": "jobs wait there", "DRAIN": "it takes no new jobs", "INACTIVE": "it takes no jobs"}
        then = what.get(partition.state.upper(), "it may not start jobs")
        yield warning("slurm.partition", f"{partition.name!r} was {partition.state} when it was looked at: {then}")
    if partition.root_only:
        yield error("slurm.partition", f"{partition.name!r} is for root only: name another one")
