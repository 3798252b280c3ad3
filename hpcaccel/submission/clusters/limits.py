"""Checks of accounts, QOS and groups, and of limits on time, nodes, arrays, GPUs and CPUs.

If several limits apply, the order of precedence is: QOS of the partition, QOS of the job, account. The flag OverPartQOS
of the job's QOS swaps the first two. The partition's own MaxTime and MaxNodes apply in addition, unless the job's QOS
has the flag PartitionTimeLimit or PartitionMaxNodes. Source: https://slurm.schedmd.com/resource_limits.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hpcaccel.core.formatting import counted, did_you_mean
from hpcaccel.spec import JobSpec
from hpcaccel.spec.cluster.cluster_facts import Account, Partition, Qos, SiteFacts
from hpcaccel.spec.job.quantities import canonical_time, time_seconds
from hpcaccel.submission.clusters.findings import Finding, error, listed, warning

__all__ = ["accounts", "array_size", "effective_account", "effective_qos", "groups", "job_limits", "partition_limits"]


def effective_account(spec: JobSpec, facts: SiteFacts) -> Account | None:
    """The association to which the job is charged, if known."""
    if spec.slurm.account is None:
        return next((one for one in facts.accounts if one.default), None)
    ours = [one for one in facts.accounts if one.account == spec.slurm.account]
    return next((one for one in ours if one.partition is None), ours[0] if ours else None)


def effective_qos(spec: JobSpec, facts: SiteFacts) -> Qos | None:
    """The job's own QOS, or the default QOS of its account; None if it is unknown."""
    account = effective_account(spec, facts)
    name = spec.slurm.qos or (None if account is None else account.default_qos)
    return None if name is None else facts.qos_named(name)


def accounts(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """Errors for the account if AccountingStorageEnforce (slurm.conf(5)) is set, and for the QOS if it includes qos."""
    enforced = {word.lower() for word in facts.config.accounting_enforce}
    if not enforced or "none" in enforced:
        return
    yield from _account(spec, facts)
    if "qos" in enforced:
        yield from _qos(spec, facts)


def _account(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    wanted, known = spec.slurm.account, sorted({one.account for one in facts.accounts})
    if wanted is None or not known:
        return
    ours = [one for one in facts.accounts if one.account == wanted]
    if not ours:
        yield error(
            "slurm.account",
            f"{wanted!r} is not one of your accounts {listed(known, 'yours')}{did_you_mean(wanted, known)}",
        )
        return
    partitions = set((spec.slurm.partition or "").split(",")) - {""}
    limited = {one.partition for one in ours if one.partition is not None}
    if partitions and not partitions & limited and all(one.partition is not None for one in ours):
        allowed = sorted(limited)
        yield error(
            "slurm.account",
            f"{wanted!r} is valid for you only in partition{'s' if len(allowed) > 1 else ''} "
            f"{' and '.join(map(repr, allowed))}, not in "
            f"{spec.slurm.partition!r}: set slurm.partition to {allowed[0]}, or use another account "
            f"{listed(known, 'yours')}",
        )


def _qos(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    wanted, account = spec.slurm.qos, effective_account(spec, facts)
    if wanted is None:
        return
    known = [one.name for one in facts.qos]
    if known and wanted not in known:
        yield error(
            "slurm.qos", f"{wanted!r} is not on cluster {facts.name!r} {listed(known)}{did_you_mean(wanted, known)}"
        )
        return
    ours = [one for one in facts.accounts if account is not None and one.account == account.account]
    allowed = sorted({name for one in ours for name in one.qos})
    if allowed and wanted not in allowed:
        assert account is not None
        yield error(
            "slurm.qos",
            f"{wanted!r} is not allowed for account {account.account!r} {listed(allowed, 'allowed')}"
            f"{did_you_mean(wanted, allowed)}",
        )


def groups(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Iterator[Finding]:
    """Errors if the partition refuses the account, the QOS or all groups of the user (scontrol(1), slurm.conf(5))."""
    account = spec.slurm.account or _name_of(effective_account(spec, facts))
    if account is not None:
        yield from _gate("slurm.account", account, partition, partition.allow_accounts, partition.deny_accounts)
    if spec.slurm.qos is not None:
        yield from _gate("slurm.qos", spec.slurm.qos, partition, partition.allow_qos, partition.deny_qos)
    members = partition.allow_groups
    if members is not None and facts.groups and not set(members) & set(facts.groups):
        yield error(
            "slurm.partition",
            f"{partition.name!r} is restricted to AllowGroups={','.join(members)}, and you are not a member: use "
            "another partition",
        )


def _gate(
    key: str, value: str, partition: Partition, allowed: list[str] | None, denied: list[str]
) -> Iterator[Finding]:
    # Slurm compares these names case-insensitively
    if allowed is not None and value.lower() not in {name.lower() for name in allowed}:
        yield error(key, f"{value!r} is not allowed in partition {partition.name!r} {listed(allowed, 'allowed')}")
    elif allowed is None and value.lower() in {name.lower() for name in denied}:
        what = "account" if key == "slurm.account" else "QOS"
        yield error(key, f"{value!r} is denied in partition {partition.name!r}: use another {what}")


def _name_of(account: Account | None) -> str | None:
    return None if account is None else account.account


_ARRAY = "the array"
"""The key of findings about an array (from --grid, or of a sweep's workers). It does not name a setting."""


class _Limit(NamedTuple):
    most: int
    whose: str
    limit: str = "allows (at most {0})"
    """The verb and the number, as a format string."""


def partition_limits(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Iterator[Finding]:
    """Errors for a time or node count that the partition, its QOS, the job's QOS or the account does not allow."""
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
            f"{spec.slurm.nodes} is less than the minimum of {whose} ({partition.min_nodes}): set slurm.nodes to "
            f"{partition.min_nodes}",
        )


def _accounted(name: str, spec: JobSpec, facts: SiteFacts, partition: Partition) -> list[_Limit]:
    """The effective limit ``name``, from a QOS or the account; [] if there is none or Slurm does not enforce limits."""
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
    """An error if the job's time exceeds the lowest of ``limits``.

    Slurm checks the shortest time that the job accepts: ``time_min`` if set, else ``time``.
    """
    if not limits:
        return
    least = min(limits, key=lambda one: one.most)
    key, text = ("slurm.time_min", spec.slurm.time_min) if spec.slurm.time_min else ("slurm.time", spec.slurm.time)
    seconds = time_seconds(text)
    if least.most == 0 or (seconds is not None and seconds <= least.most * 60):
        return
    allowed = canonical_time(str(least.most))
    longer = " (a run that needs longer is requeued)" if spec.resilience.requeue else ""
    yield error(key, f"{text} is longer than {least.whose} allows (at most {allowed}): set {key} to {allowed}{longer}")


def _nodes(spec: JobSpec, limits: list[_Limit]) -> Iterator[Finding]:
    least = min(limits, key=lambda one: one.most, default=None)
    if least is not None and spec.slurm.min_nodes > least.most:
        yield error(
            "slurm.nodes",
            f"{spec.slurm.nodes} is more than {least.whose} {least.limit.format(least.most)}: set slurm.nodes to "
            f"{least.most}",
        )


def job_limits(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """Errors if the job's GPUs or CPUs exceed a limit of its QOS (MaxTRES, MaxTRESPU) or account (MaxTRES, GrpTRES)."""
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
            what = "GPU" if tres == "gres/gpu" else "CPU"
            per_node = max(1, count // slurm.min_nodes)
            fits = least.most // per_node
            fewer = f"request at most {counted(least.most, what)}" if least.most else "use another QOS or account"
            remedy = f"set slurm.nodes to {fits}" if fits else fewer
            yield error(
                "slurm.nodes",
                f"{slurm.nodes} with {counted(per_node, what)} each is {counted(count, what)}, more than {least.whose} "
                f"{least.limit.format(least.most)}: {remedy}",
            )


def _tres_limits(tres: str, qos: Qos | None, account: Account | None) -> Iterator[_Limit]:
    if qos is not None:
        for limits, scope in ((qos.max_tres, "per job"), (qos.max_tres_per_user, "per user")):
            yield from _tres(limits, tres, f"QOS {qos.name!r}", scope)
    if account is not None and (qos is None or tres not in qos.max_tres):
        for limits, scope in ((account.max_tres, "per job"), (account.group_tres, "for all of its jobs together")):
            yield from _tres(limits, tres, f"account {account.account!r}", scope)


def _tres(limits: dict[str, str], tres: str, whose: str, scope: str) -> list[_Limit]:
    match = re.fullmatch(r"\d+", limits.get(tres, ""))
    return [_Limit(int(match[0]), whose, f"allows {scope} (at most {{0}})")] if match else []


def array_size(spec: JobSpec, facts: SiteFacts, tasks: int | None) -> Iterator[Finding]:
    """Findings if the array is too large: MaxArraySize (slurm.conf(5)) limits its tasks, MaxSubmit all queued jobs."""
    most = facts.config.max_array_size
    if tasks is None:
        return
    if most is not None and tasks > most:
        if most == 0:
            yield error(
                _ARRAY, f"of {tasks} tasks cannot run: cluster {facts.name!r} allows no arrays (MaxArraySize=0)"
            )
            return
        yield error(
            _ARRAY,
            f"of {tasks} tasks is larger than cluster {facts.name!r} allows (at most {most}, MaxArraySize): split it "
            "into several arrays",
        )
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
            f"of {tasks} tasks has more jobs than {least.whose} allows in the queue at a time (at most {least.most}): "
            "split it into several arrays",
        )
