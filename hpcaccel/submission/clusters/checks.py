"""Offline checks of a job spec against the stored facts of its cluster: would Slurm refuse the job, or never start it?

Unknown facts are not errors: an unknown limit is no limit, and a list that could not be read forbids nothing. A job
can list several partitions, of which Slurm uses the one that can start the job first (sbatch(1)): if one partition
accepts the job, findings about the others are only warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import SpecError
from hpcaccel.slurm import hostlist
from hpcaccel.spec import ClusterProfile, JobSpec, spec_from_values
from hpcaccel.spec.cluster.cluster_facts import Partition, SiteFacts, load_facts
from hpcaccel.spec.job.component_fields import ComponentSlurmSection
from hpcaccel.submission.clusters.checkpoint_checks import History, preemption, read_history, storage
from hpcaccel.submission.clusters.findings import Finding, error, listed, located, warning, with_age
from hpcaccel.submission.clusters.limits import accounts, array_size, groups, job_limits, partition_limits
from hpcaccel.submission.clusters.nodes import hardware

__all__ = [
    "STALE_DAYS",
    "Contradiction",
    "advice_or_refusal",
    "check",
    "check_site",
    "findings_for",
    "wanted_partitions",
    "way_out",
]


def findings_for(
    spec: JobSpec, profile: ClusterProfile | None, *, array_tasks: int | None = None, runs_dir: Path | None = None
) -> tuple[SiteFacts | None, list[Finding]]:
    """The stored facts of a profile and the findings for ``spec``.

    Returns (None, []) without a profile, for the local backend, or if no facts are stored.

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
    """The warnings of :func:`findings_for` as text; None if there are no facts.

    Args:
        can_leave_aside: whether the command has the option --no-facts, which the message then mentions.

    Raises:
        SpecError: the facts cannot be read, or the spec has errors. In the second case, the message lists all errors
            and what to do if the facts are out of date.
    """
    facts, found = findings_for(spec, profile, array_tasks=array_tasks, runs_dir=runs_dir)
    if facts is None:
        return None
    if any(one.is_error for one in found):
        wrong = [str(one) for one in found if one.is_error]
        raise SpecError(wrong, hints=[way_out(facts, can_leave_aside=can_leave_aside)])
    return tuple(str(one) for one in found)


def way_out(facts: SiteFacts, *, can_leave_aside: bool = True) -> str:
    """A hint for the user: what to do if the cluster has changed since it was probed."""
    ignore = ", or ignore its stored facts with --no-facts" if can_leave_aside else ""
    name = facts.name
    return f"if cluster {name!r} has changed since it was probed, run `hpcaccel cluster probe {name}`{ignore}"


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
    """The findings for ``spec``, errors first; none if ``spec`` is for another cluster of a federation.

    Args:
        array_tasks: the number of tasks of an array; None for a single job.
        runs_dir: where run directories are created on the cluster; None if unknown.
        history: measurements of the last run of the same name.
        now: the current time in seconds since 1970, for the age of the facts.
        with_ages: whether to append the age of the facts to each finding.
    """
    if spec.slurm.clusters not in (None, facts.config.cluster_name):
        return []  # the facts describe another cluster of the federation
    spec = spec.with_spare_nodes()
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
    """Findings for the nodes of each component, and for preemption in partitions that the ranks do not use.

    If one component is preempted, Slurm preempts the whole job.
    """
    for name in spec.components:
        alone = spec.of_component(name)
        found = [*_of_nodes(alone, facts)]
        if alone.slurm.partition != spec.slurm.partition:
            found += preemption(alone, facts, wanted_partitions(alone, facts), history=history)
        for one in found:
            yield replace(one, key=_in_component(one.key, name), message=_in_component(one.message, name))
    yield from _too_many_together(spec, facts)


def _in_component(text: str, name: str) -> str:
    """Prefix keys such as ``slurm.nodes`` with ``components.NAME.``, but not keys of the whole job (``slurm.time``)."""
    keys = "|".join(ComponentSlurmSection.model_fields)
    return re.sub(rf"\bslurm\.(?:{keys})\b", lambda match: f"components.{name}.{match[0]}", text)


def _too_many_together(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """An error if the ranks and components that request the same single partition need more nodes than it has.

    Slurm's backfill scheduler places each component on separate nodes, even if it uses few of their CPUs
    (https://slurm.schedmd.com/heterogeneous_jobs.html, "Limitations"; on Slurm 22.05 the job stayed pending forever).
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
                f"and the ranks together need {nodes} nodes of partition {name!r}, which has {partition.nodes}: "
                "request fewer nodes, or move a component to another partition",
            )


def wanted_partitions(spec: JobSpec, facts: SiteFacts) -> list[Partition]:
    """The partitions that the spec names and the cluster has; the default partition if the spec names none."""
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
                f"{name!r} is not on cluster {facts.name!r} {listed(known)}{did_you_mean(name, known)}",
            )


def _by_partition(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """The findings for each partition of the spec; all are warnings if at least one partition accepts the job."""
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
        what = {"DOWN": "its jobs stay pending", "DRAIN": "it accepts no new jobs", "INACTIVE": "it accepts no jobs"}
        then = what.get(partition.state.upper(), "it may not start jobs")
        yield warning(
            "slurm.partition", f"{partition.name!r} was {partition.state} when the cluster was probed: {then}"
        )
    if partition.root_only:
        yield error("slurm.partition", f"{partition.name!r} is restricted to root: use another partition")


STALE_DAYS = 30
"""Facts older than this are reported as out of date: sites change their partitions a few times a year."""


@dataclass(frozen=True)
class Contradiction:
    """A setting of a profile that is wrong or missing according to the cluster's facts."""

    key: str
    message: str
    """The text that follows the key."""
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.key} {self.message}"


def check(profile: ClusterProfile, facts: SiteFacts) -> list[Contradiction]:
    """The settings of ``profile`` that are wrong or missing according to ``facts``.

    Raises:
        SpecError: the profile's own settings conflict, or ``exclude`` has an invalid host list.
    """
    return [*_defaults(profile, facts), *_excluded(profile, facts), *_other(profile, facts)]


def _defaults(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    """Check a job that has only the profile's defaults; yield the findings about settings that the profile makes."""
    spec = spec_from_values({"name": profile.name, "entrypoint": {"command": ["true"]}}, profile=profile)
    given = set(profile.slurm.model_fields_set)
    for one in check_site(spec, facts):
        section, _, key = one.key.partition(".")
        if section == "slurm" and key in given:
            yield Contradiction(one.key, one.message, one.is_error)


def _excluded(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    try:
        known = {name for kind in facts.node_types for name in hostlist.expand(kind.nodes)}
        wanted = {item: hostlist.expand(item) for item in profile.exclude}
    except ValueError as error:
        raise SpecError(f"exclude: {error}") from None
    for item, names in wanted.items():
        missing = [name for name in names if name not in known]
        if known and missing:
            yield Contradiction(
                "exclude", f"{item!r}: node {missing[0]!r} is not on the cluster {listed(sorted(known))}"
            )


def _other(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    if profile.host != facts.host:
        given = "is not set" if profile.host is None else f"is {profile.host!r}"
        probed = "this machine" if facts.host is None else repr(facts.host)
        remedy = f"run `hpcaccel cluster probe {profile.name}`"
        yield Contradiction("host", f"{given}, but the facts were collected on {probed}: {remedy}", is_error=False)
    if profile.host is not None and facts.hpcaccel is None:
        yield Contradiction(
            "hpcaccel", f"was not found on {profile.host!r}: run `hpcaccel cluster install {profile.name}`"
        )
    if not profile.runs_dir and profile.host is not None:
        yield Contradiction("runs_dir", "is not set: runs go to your home directory on the cluster", is_error=False)
