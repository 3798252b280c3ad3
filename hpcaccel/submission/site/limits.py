"""Limits of time, nodes, arrays and GPUs: of the partition, of its QOS, of the job's QOS and of the account.

Which limit counts where several speak: the partition's QOS, then the job's (the other way round with OverPartQOS), then
the account's; none of them may go beyond the partition's own MaxTime and MaxNodes, unless the QOS says so by
PartitionTimeLimit or PartitionMaxNodes. Source: https://slurm.schedmd.com/resource_limits.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hpcaccel.spec import JobSpec
from hpcaccel.spec.quantities import canonical_time, time_seconds
from hpcaccel.spec.site import Account, Partition, Qos, SiteFacts
from hpcaccel.submission.site.accounts import effective_account, effective_qos
from hpcaccel.submission.site.findings import Finding, error, warning

__all__ = ["array_size", "job_limits", "partition_limits"]


_ARRAY = "the array"
"""In place of a setting: it comes from --grid, or from a sweep's workers."""


class _Limit(NamedTuple):
    most: int
    whose: str
    says: str = "allows (at most {0})"


def partition_limits(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Iterator[Finding]:
    """Time and nodes of one partition, its QOS taken together with the job's and the account's limits."""
    qos = effective_qos(spec, facts)
    whose = f"partition {partition.name!r}"
    flags = set() if qos is None else {flag.lower() for flag in qos.flags}
    time_limits = [] if "partitiontimelimit" in flags else _known(partition.max_time_minutes, whose)
    yield from _time(spec, [*time_limits, *_accounted("max_wall_minutes", spec, facts, partition)])
    node_limits = [] if "partitionmaxnodes" in flags else _known(partition.max_nodes, whose)
    node_limits += [_Limit(partition.nodes, whose, "has ({0})")] if partition.nodes else []
    yield from _nodes(spec, [*node_limits, *_accounted("max_nodes", spec, facts, partition)])
    if spec.slurm.max_nodes < partition.min_nodes and "partitionminnodes" not in flags:
        yield error(
            "slurm.nodes",
            f"{spec.slurm.nodes} is less than {whose} takes (at least {partition.min_nodes}): set slurm.nodes to "
            f"{partition.min_nodes}",
        )


def _accounted(name: str, spec: JobSpec, facts: SiteFacts, partition: Partition) -> list[_Limit]:
    """The limit ``name`` of QOS and account that counts, where Slurm enforces limits at all."""
    if not _enforced(facts):
        return []
    job_qos = effective_qos(spec, facts)
    part_qos = facts.qos_named(partition.qos) if partition.qos else None
    order = [part_qos, job_qos]
    if job_qos is not None and "overpartqos" in {flag.lower() for flag in job_qos.flags}:
        order.reverse()
    for qos in order:
        if qos is not None and (most := getattr(qos, name)) is not None:
            return [_Limit(most, f"QOS {qos.name!r}")]
    account = effective_account(spec, facts)
    most = None if account is None else getattr(account, name, None)
    return [] if account is None else _known(most, f"account {account.account!r}")


def _enforced(facts: SiteFacts) -> bool:
    return bool({"limits", "safe", "all"} & {word.lower() for word in facts.config.accounting_enforce})


def _known(most: int | None, whose: str) -> list[_Limit]:
    return [] if most is None else [_Limit(most, whose)]


def _time(spec: JobSpec, limits: list[_Limit]) -> Iterator[Finding]:
    """Slurm takes the shortest time that the job could do with: time_min, where it is set."""
    if not limits:
        return
    least = min(limits, key=lambda one: one.most)
    key, text = ("slurm.time_min", spec.slurm.time_min) if spec.slurm.time_min else ("slurm.time", spec.slurm.time)
    seconds = time_seconds(text)
    if least.most == 0 or (seconds is not None and seconds <= least.most * 60):
        return
    allowed = canonical_time(str(least.most))
    come_back = " (a run that needs longer comes back through the queue)" if spec.resilience.requeue else ""
    yield error(
        key, f"{text} is longer than {least.whose} allows (at most {allowed}): set {key} to {allowed}{come_back}"
    )


def _nodes(spec: JobSpec, limits: list[_Limit]) -> Iterator[Finding]:
    least = min(limits, key=lambda one: one.most, default=None)
    if least is not None and spec.slurm.min_nodes > least.most:
        yield error(
            "slurm.nodes",
            f"{spec.slurm.nodes} is more than {least.whose} {least.says.format(least.most)}: set slurm.nodes to "
            f"{least.most}",
        )


def job_limits(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """GPUs and CPUs of the whole job, where QOS or account limit them (MaxTRES; MaxTRESPU: of a user's jobs)."""
    if not _enforced(facts):
        return
    slurm = spec.slurm
    wanted = {"gres/gpu": slurm.node_gpus * slurm.min_nodes}
    if slurm.cpus_per_task is not None:
        wanted["cpu"] = slurm.cpus_per_task * slurm.ranks_per_node * slurm.min_nodes
    for tres, count in wanted.items():
        limits = _tres_limits(tres, effective_qos(spec, facts), effective_account(spec, facts))
        least = min(limits, key=lambda one: one.most, default=None)
        if least is not None and count > least.most:
            what = "GPUs" if tres == "gres/gpu" else "CPUs"
            per_node = max(1, count // slurm.min_nodes)
            fits = least.most // per_node
            mend = f"set slurm.nodes to {fits}" if fits else f"ask for at most {least.most} {what} of a node"
            yield error(
                "slurm.nodes",
                f"{slurm.nodes} with {per_node} {what} each is {count} {what}, more than {least.whose} allows "
                f"(at most {least.most}): {mend}",
            )


def _tres_limits(tres: str, qos: Qos | None, account: Account | None) -> Iterator[_Limit]:
    if qos is not None:
        for limits, of in ((qos.max_tres, ""), (qos.max_tres_per_user, " a user's jobs")):
            yield from _tres(limits, tres, f"QOS {qos.name!r}{of}")
    if account is not None and (qos is None or tres not in qos.max_tres):
        for limits, of in ((account.max_tres, ""), (account.group_tres, " all its jobs together")):
            yield from _tres(limits, tres, f"account {account.account!r}{of}")


def _tres(limits: dict[str, str], tres: str, whose: str) -> list[_Limit]:
    match = re.fullmatch(r"\d+", limits.get(tres, ""))
    return [_Limit(int(match[0]), whose)] if match else []


def array_size(spec: JobSpec, facts: SiteFacts, tasks: int | None) -> Iterator[Finding]:
    """MaxArraySize caps the highest index (slurm.conf(5)), MaxSubmit what one user has in the queue."""
    most = facts.config.max_array_size
    if tasks is None:
        return
    if most is not None and tasks > most:
        mend = "this cluster takes no arrays" if most == 0 else f"at most {most} (MaxArraySize): split it into several"
        yield error(_ARRAY, f"of {tasks} tasks is larger than cluster {facts.name!r} takes: {mend}")
        return
    if not _enforced(facts):
        return
    qos, account = effective_qos(spec, facts), effective_account(spec, facts)
    limits = [] if qos is None else _known(qos.max_submit, f"QOS {qos.name!r}")
    limits += [] if account is None else _known(account.max_submit, f"account {account.account!r}")
    least = min(limits, key=lambda one: one.most, default=None)
    if least is not None and tasks > least.most:
        yield warning(
            _ARRAY,
            f"of {tasks} tasks is more than {least.whose} lets you have in the queue (at most {least.most}): split it",
        )
