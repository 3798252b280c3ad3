"""Pure functions that convert Slurm's records into facts. Fields that a Slurm version does not print stay unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpcaccel.slurm import hostlist
from hpcaccel.slurm.site_parsing import count, first, gres, listed, minutes, seconds, tres, why_not_expedited
from hpcaccel.spec.cluster.cluster_facts import Account, NodeType, Partition, Qos, SiteConfig

__all__ = ["accounts", "config", "node_types", "partitions", "qos"]

Row = Mapping[str, str]

_EVERYBODY = "ALL"
_STATE_MARKS = re.compile(r"[*~#!%$@^+-]+$")


def config(values: Row) -> SiteConfig:
    """The settings of ``scontrol show config``."""
    storage = values.get("AccountingStorageType")
    enforce = values.get("AccountingStorageEnforce", "")
    return SiteConfig(
        cluster_name=values.get("ClusterName", ""),
        max_array_size=count(values.get("MaxArraySize")),
        max_job_count=count(values.get("MaxJobCount")),
        max_batch_requeue=count(values.get("MaxBatchRequeue")),
        kill_wait_seconds=seconds(values.get("KillWait")),
        job_requeue=_number_flag(values.get("JobRequeue")),
        expedited_requeue=not why_not_expedited(values) if "SLURM_VERSION" in values else None,
        preempt_type=values.get("PreemptType") or None,
        preempt_mode=values.get("PreemptMode") or None,
        preempt_exempt_seconds=seconds(values.get("PreemptExemptTime")),
        accounting=None if storage is None else storage not in ("", "accounting_storage/none"),
        accounting_enforce=[] if enforce.lower() == "none" else listed(enforce),
        enforce_part_limits=values.get("EnforcePartLimits") or None,
        select_type=values.get("SelectType") or None,
        select_type_parameters=values.get("SelectTypeParameters") or None,
        over_time_limit_minutes=minutes(values.get("OverTimeLimit")),
        def_mem_per_node_mb=count(values.get("DefMemPerNode")),
        def_mem_per_cpu_mb=count(values.get("DefMemPerCPU")),
        max_mem_per_node_mb=count(values.get("MaxMemPerNode")),
        licenses=listed(values.get("Licenses")),
        submit_plugins=listed(values.get("JobSubmitPlugins")),
        topology=values.get("TopologyPlugin") or None,
    )


def partitions(rows: Iterable[Row], kinds: Sequence[NodeType]) -> list[Partition]:
    """The partitions of ``scontrol show partition``, with node types matched by node names."""
    members = {kind.name: set(hostlist.expand(kind.nodes)) for kind in kinds}
    return [_partition(row, members) for row in rows]


def _partition(row: Row, members: Mapping[str, set[str]]) -> Partition:
    inside = _hosts(row.get("Nodes"))
    return Partition(
        name=row["PartitionName"],
        default=row.get("Default") == "YES",
        state=row.get("State", "UP"),
        max_time_minutes=minutes(row.get("MaxTime")),
        default_time_minutes=minutes(row.get("DefaultTime")),
        max_nodes=count(row.get("MaxNodes")),
        min_nodes=count(row.get("MinNodes")) or 0,
        nodes=count(row.get("TotalNodes")) or len(inside),
        max_cpus_per_node=count(row.get("MaxCPUsPerNode")),
        max_mem_per_node_mb=count(row.get("MaxMemPerNode")),
        def_mem_per_node_mb=count(row.get("DefMemPerNode")),
        def_mem_per_cpu_mb=count(row.get("DefMemPerCPU")),
        allow_accounts=_allowed(row.get("AllowAccounts")),
        deny_accounts=listed(row.get("DenyAccounts")),
        allow_qos=_allowed(row.get("AllowQos")),
        deny_qos=listed(row.get("DenyQos")),
        allow_groups=_allowed(row.get("AllowGroups")),
        qos=first(row, "QoS") or None,
        preempt_mode=row.get("PreemptMode"),
        grace_seconds=count(row.get("GraceTime")) or 0,
        priority_tier=count(row.get("PriorityTier")) or 0,
        exclusive=row.get("OverSubscribe") == "EXCLUSIVE" or row.get("Exclusive") in ("YES", "NODE"),
        root_only=row.get("RootOnly") == "YES",
        reservation_required=row.get("ReqResv") == "YES",
        over_time_limit_minutes=minutes(row.get("OverTimeLimit")),
        node_types=[name for name, hosts in members.items() if hosts & inside],
    )


def node_types(rows: Iterable[Row]) -> list[NodeType]:
    """Group equal nodes into node types, sorted by number of GPUs, then by number of CPUs, largest first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_likeness(row), []).append(row)
    kinds: list[NodeType] = []
    for group in groups.values():
        kinds.append(_node_type(group, {kind.name for kind in kinds}))
    return sorted(kinds, key=lambda kind: (-kind.gpu_count, -kind.cpus, kind.name))


def _likeness(row: Row) -> tuple[object, ...]:
    gpus, others = gres(row.get("Gres"))
    features = listed(first(row, "ActiveFeatures", "AvailableFeatures"))
    return (*sorted(gpus.items()), *sorted(others), *sorted(features), _cpus(row), row.get("RealMemory"))


def _node_type(group: Sequence[Row], taken: set[str]) -> NodeType:
    row = group[0]
    gpus, others = gres(row.get("Gres"))
    memory = count(row.get("RealMemory")) or 0
    states: dict[str, int] = {}
    for one in group:
        state = _state(one.get("State", "unknown"))
        states[state] = states.get(state, 0) + 1
    what = [f"{number}x{kind}" for kind, number in gpus.items()]
    return NodeType(
        name=_unique("-".join([*what, f"{_cpus(row)}cpu", f"{round(memory / 1024)}G"]), taken),
        gpus=gpus,
        cpus=_cpus(row),
        sockets=count(row.get("Sockets")),
        threads_per_core=count(row.get("ThreadsPerCore")),
        memory_mb=memory,
        tmp_disk_mb=count(row.get("TmpDisk")) or None,
        features=listed(first(row, "ActiveFeatures", "AvailableFeatures")),
        gres=others,
        count=len(group),
        nodes=hostlist.compress(one["NodeName"] for one in group),
        states=states,
    )


def _cpus(row: Row) -> int:
    """CPUs of a node that jobs can use. CPUEfctv (from 22.05 on) excludes CPUs that are reserved for the system."""
    return count(row.get("CPUEfctv")) or count(row.get("CPUTot")) or 0


def _state(text: str) -> str:
    """A node's state in one word, one that blocks jobs if any: ``IDLE+DRAIN`` → drain, ``MIXED+PLANNED`` → mixed."""
    base, *flags = _STATE_MARKS.sub("", text.lower()).split("+")
    for telling in ("down", "fail", "drain", "maint", "reserved", "not_responding"):
        if telling in flags or base == telling:
            return telling
    return base


def _unique(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


def accounts(rows: Iterable[Row], cluster: str) -> list[Account]:
    """The user's associations on this cluster; one database may serve several clusters."""
    return [_account(row) for row in rows if row.get("Account") and row.get("Cluster", cluster) in (cluster, "")]


def _account(row: Row) -> Account:
    account = row["Account"]
    return Account(
        account=account,
        partition=first(row, "Partition") or None,
        default=account == first(row, "Def Acct", "DefaultAccount"),
        qos=listed(row.get("QOS")),
        default_qos=first(row, "Def QOS", "DefaultQOS") or None,
        max_wall_minutes=minutes(row.get("MaxWall")),
        max_jobs=count(row.get("MaxJobs")),
        max_submit=count(row.get("MaxSubmit")),
        max_tres=tres(row.get("MaxTRES")),
        group_tres=tres(row.get("GrpTRES")),
    )


def qos(rows: Iterable[Row]) -> list[Qos]:
    """The QOS in the rows of ``sacctmgr show qos``."""
    return [_qos(row) for row in rows if row.get("Name")]


def _qos(row: Row) -> Qos:
    limits = tres(row.get("MaxTRES"))
    return Qos(
        name=row["Name"],
        priority=count(row.get("Priority")),
        max_wall_minutes=minutes(row.get("MaxWall")),
        max_jobs=count(first(row, "MaxJobsPU", "MaxJobsPerUser")),
        max_submit=count(first(row, "MaxSubmitPU", "MaxSubmitJobsPerUser")),
        max_nodes=count(limits.get("node")),
        max_tres=limits,
        max_tres_per_node=tres(row.get("MaxTRESPerNode")),
        max_tres_per_user=tres(first(row, "MaxTRESPU", "MaxTRESPerUser")),
        min_tres=tres(row.get("MinTRES")),
        flags=listed(row.get("Flags")),
        preempts=listed(row.get("Preempt")),
        preempt_mode=first(row, "PreemptMode") or None,
        grace_seconds=seconds(row.get("GraceTime")) or 0,
        preempt_exempt_seconds=seconds(row.get("PreemptExemptTime")),
    )


def _allowed(text: str | None) -> list[str] | None:
    return None if text is None or text == _EVERYBODY else listed(text)


def _hosts(text: str | None) -> set[str]:
    return {name for item in [text] if item and item != "(null)" for name in hostlist.expand(item)}


def _number_flag(text: str | None) -> bool | None:
    return None if text is None else text.strip() in ("1", "YES", "yes")
