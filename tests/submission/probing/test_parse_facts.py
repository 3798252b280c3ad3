"""Parsing of cluster facts from the output of several Slurm versions.

22.05 and 26.11 were recorded on our own clusters. 23.02.7's configuration is the example in the tests of
vantage-agent (github.com/vantagecompute), shortened; 24.05.6's node and the partition l40 are in the user guide of the
PRAJNA (AI/ML) cluster, the partition gpu-bio in Charles University's "Kickstarter to HPC resources for bioinfo".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.slurm import site_parsing
from hpcaccel.submission.clusters import parse_facts

RECORDED = Path(__file__).parents[2] / "data" / "slurm"


def records(version: str, what: str, key: str) -> list[dict[str, str]]:
    return site_parsing.records((RECORDED / version / f"scontrol-show-{what}.txt").read_text(), key)


@pytest.mark.parametrize(
    ("version", "kill_wait", "preempt"),
    [
        ("22.05", 10, ("preempt/partition_prio", "REQUEUE")),
        ("23.02", 30, ("preempt/none", "OFF")),
        ("26.11", 10, ("preempt/partition_prio", "REQUEUE")),
    ],
)
def test_recorded_configuration_is_parsed(version: str, kill_wait: int, preempt: tuple[str, str]) -> None:
    values = site_parsing.config_values((RECORDED / version / "scontrol-show-config.txt").read_text())
    found = parse_facts.config(values)
    assert (found.kill_wait_seconds, found.max_array_size, found.job_requeue) == (kill_wait, 1001, True)
    assert (found.preempt_type, found.preempt_mode, found.preempt_exempt_seconds) == (*preempt, 0)
    assert (found.accounting, found.accounting_enforce, found.over_time_limit_minutes) == (True, [], 0)
    assert (found.max_mem_per_node_mb, found.licenses, found.submit_plugins) == (None, [], [])


def test_missing_accounting_is_recognized() -> None:
    assert parse_facts.config({"AccountingStorageType": "accounting_storage/none"}).accounting is False
    assert parse_facts.config({"AccountingStorageType": ""}).accounting is False
    assert parse_facts.config({}).accounting is None


@pytest.mark.parametrize("version", ["22.05", "26.11"])
def test_recorded_partitions_and_nodes_are_parsed(version: str) -> None:
    kinds = parse_facts.node_types(records(version, "node", "NodeName"))
    (kind,) = kinds
    assert (kind.name, kind.gpus, kind.cpus, kind.memory_mb) == ("2xgpu-8cpu-20G", {"gpu": 2}, 8, 20000)
    assert (kind.count, kind.nodes, kind.states, kind.tmp_disk_mb) == (4, "n[1-4]", {"mixed": 4}, None)
    gpu, urgent = parse_facts.partitions(records(version, "partition", "PartitionName"), kinds)
    assert (gpu.name, gpu.default, gpu.grace_seconds, gpu.preempt_mode) == ("gpu", True, 20, "REQUEUE")
    assert (gpu.max_time_minutes, gpu.default_time_minutes, gpu.max_nodes, gpu.nodes) == (1440, None, None, 4)
    assert (gpu.allow_accounts, gpu.allow_qos, gpu.qos, gpu.exclusive) == (None, None, None, False)
    assert (urgent.priority_tier, urgent.preempt_mode, urgent.node_types) == (10, "OFF", ["2xgpu-8cpu-20G"])


def test_partitions_and_nodes_of_24_05_are_parsed() -> None:
    (kind,) = parse_facts.node_types(records("24.05", "node", "NodeName"))
    assert (kind.gpus, kind.cpus, kind.threads_per_core, kind.memory_mb) == ({"gpu": 4}, 64, 2, 515317)
    l40, bio = parse_facts.partitions(records("24.05", "partition", "PartitionName"), [kind])
    assert (l40.max_time_minutes, l40.allow_qos, l40.nodes, l40.node_types) == (None, ["l40"], 7, [])
    assert (bio.allow_accounts, bio.default_time_minutes, bio.max_time_minutes) == (["ksibio"], 60, 10080)
    assert (bio.exclusive, bio.priority_tier, bio.preempt_mode) == (False, 800, "REQUEUE")


def test_nodes_are_grouped_by_hardware_and_features() -> None:
    rows = [
        {"NodeName": "a1", "Gres": "gpu:a100:4(S:0-1)", "CPUTot": "64", "CPUEfctv": "60", "RealMemory": "512000"},
        {"NodeName": "a2", "Gres": "gpu:a100:4(S:0)", "CPUTot": "64", "CPUEfctv": "60", "RealMemory": "512000"},
        {"NodeName": "c1", "Gres": "(null)", "CPUTot": "128", "RealMemory": "256000", "ActiveFeatures": "ib,amd"},
        {"NodeName": "c2", "Gres": "(null)", "CPUTot": "128", "RealMemory": "256000"},
    ]
    states = ["IDLE+DRAIN", "MIXED+PLANNED", "IDLE*+NOT_RESPONDING", "DOWN*"]
    kinds = parse_facts.node_types([{**row, "State": state} for row, state in zip(rows, states, strict=True)])
    assert [(kind.name, kind.nodes, kind.states) for kind in kinds] == [
        ("4xa100-60cpu-500G", "a[1-2]", {"drain": 1, "mixed": 1}),
        ("128cpu-250G", "c1", {"not_responding": 1}),
        ("128cpu-250G-2", "c2", {"down": 1}),
    ]
    assert kinds[1].features == ["ib", "amd"]


def test_accounts_of_other_clusters_are_ignored() -> None:
    head = "Def Acct|Cluster|Account|Partition|Def QOS|QOS|MaxJobs|MaxSubmit|MaxWall|MaxTRES|GrpTRES"
    rows = site_parsing.table(
        f"{head}\nml|alps|ml|||normal,high|4|100|2-00:00:00|gres/gpu=16|\nml|alps|bio|gpu|high|high|||||node=8\n"
        "ml|other|ml|||normal|||||\n"
    )
    ml, bio = parse_facts.accounts(rows, "alps")
    assert (ml.account, ml.default, ml.qos, ml.max_wall_minutes) == ("ml", True, ["normal", "high"], 2880)
    assert (ml.max_jobs, ml.max_submit, ml.max_tres, ml.partition) == (4, 100, {"gres/gpu": "16"}, None)
    assert (bio.default, bio.partition, bio.default_qos, bio.group_tres) == (False, "gpu", "high", {"node": "8"})


@pytest.mark.parametrize("version", ["22.05", "26.11"])
def test_recorded_qos_is_parsed(version: str) -> None:
    (normal,) = parse_facts.qos(site_parsing.table((RECORDED / version / "sacctmgr-qos.txt").read_text()))
    assert (normal.name, normal.priority, normal.grace_seconds, normal.preempt_mode) == ("normal", 0, 0, "cluster")
    assert (normal.max_wall_minutes, normal.max_nodes, normal.flags) == (None, None, [])


def test_limits_of_a_qos_are_parsed() -> None:
    head = "Name|Priority|GraceTime|Preempt|PreemptMode|Flags|MaxWall|MaxTRES|MaxTRESPU|MaxJobsPU|MaxSubmitPU|MinTRES"
    (debug,) = parse_facts.qos(
        site_parsing.table(
            f"{head}\ndebug|10|00:02:00|low,idle|requeue|DenyOnLimit|30|node=2,gres/gpu=4||1|2|gres/gpu=1\n"
        )
    )
    assert (debug.max_wall_minutes, debug.max_nodes, debug.max_jobs, debug.max_submit) == (30, 2, 1, 2)
    assert (debug.grace_seconds, debug.preempts, debug.preempt_mode) == (120, ["low", "idle"], "requeue")
    assert (debug.flags, debug.min_tres) == (["DenyOnLimit"], {"gres/gpu": "1"})
