"""Checks of a spec against the facts of a cluster: errors, warnings and proposed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import spec_from_values
from hpcaccel.spec.cluster.cluster_facts import SiteFacts, store_facts
from hpcaccel.spec.cluster.cluster_profile import ClusterProfile
from hpcaccel.submission.clusters.checkpoint_checks import History
from hpcaccel.submission.clusters.checks import advice_or_refusal, check_site

DAY = 86400
NOW = 1_800_000_000.0
NODES = [
    {"name": "a", "gpus": {"a100": 4}, "cpus": 64, "memory_mb": 512000, "features": ["a100", "ib"], "count": 6},
    {"name": "v", "gpus": {"v100": 2}, "cpus": 32, "memory_mb": 192000, "features": ["v100"], "count": 10},
]
PARTITIONS: list[dict[str, Any]] = [
    {"name": "gpu", "default": True, "max_time_minutes": 1440, "max_nodes": 8, "nodes": 16, "node_types": ["a", "v"]},
    {"name": "debug", "max_time_minutes": 30, "nodes": 2, "node_types": ["v"], "allow_qos": ["debug"]},
    {"name": "spot", "nodes": 16, "node_types": ["a", "v"], "preempt_mode": "REQUEUE", "priority_tier": 1},
    {"name": "cancelling", "nodes": 16, "node_types": ["a", "v"], "preempt_mode": "CANCEL", "priority_tier": 1},
    {"name": "vip", "nodes": 6, "node_types": ["a"], "allow_accounts": ["chiefs"], "priority_tier": 9},
    {"name": "old", "nodes": 2, "node_types": ["v"], "state": "DRAIN"},
]
CONFIG = {
    "max_array_size": 1001,
    "kill_wait_seconds": 30,
    "job_requeue": False,
    "preempt_type": "preempt/partition_prio",
    "preempt_mode": "REQUEUE",
    "accounting_enforce": ["associations", "limits", "qos"],
}


def facts(**changes: Any) -> SiteFacts:
    values: dict[str, Any] = {
        "name": "alps",
        "probed_at": NOW - 3 * DAY,
        "slurm_version": "23.11.4",
        "config": CONFIG,
        "partitions": PARTITIONS,
        "node_types": NODES,
        "accounts": [{"account": "ml", "default": True, "qos": ["normal", "debug"], "default_qos": "normal"}],
        "qos": [{"name": "normal", "max_wall_minutes": 2880, "max_tres": {"gres/gpu": "24"}}, {"name": "debug"}],
        "quota": [{"path": "/scratch/me", "bytes_limit": 100 * 10**9, "bytes_used": 40 * 10**9}],
    }
    return SiteFacts.model_validate({**values, **changes})


OPEN = facts(
    accounts=[{"account": "chiefs", "default": True, "qos": ["normal"], "default_qos": "normal"}],
    qos=[{"name": "normal"}],
)
"""Facts for a user with an account that may use partition vip, and without QOS limits."""


def said(
    slurm: dict[str, Any], *, history: History | None = None, tasks: int | None = None, site: Any = None, **rest: Any
) -> list[str]:
    values = {"name": "gpt", "entrypoint": {"script": "train.py"}, "slurm": slurm, **rest}
    spec = spec_from_values(values)
    found = check_site(
        spec, site or facts(), array_tasks=tasks, runs_dir=Path("/scratch/me/runs"), history=history, now=NOW
    )
    return [f"{'error' if one.is_error else 'warning'}: {one}" for one in found]


GOOD: dict[str, Any] = {"partition": "gpu", "nodes": 2, "gpus_per_node": "a100:4", "cpus_per_task": 8, "mem": "400G"}


@pytest.mark.parametrize(
    "slurm",
    [
        {},
        GOOD,
        {**GOOD, "account": "ml", "qos": "debug", "time": "1-00:00:00", "constraint": "a100&ib"},
        {**GOOD, "partition": "gpu,spot", "constraint": "[a100*1&v100*1]", "gpus_per_node": None},
        {**GOOD, "time": "3-00:00:00", "time_min": "12:00:00"},
        {"partition": "elsewhere", "clusters": "another"},
        {"partition": "debug", "qos": "debug", "time": 30, "gres": "gpu:v100:2,nvme:1"},
    ],
)
def test_feasible_request_gets_no_finding(slurm: dict[str, Any]) -> None:
    assert said(slurm) == []


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"partition": "old", "nodes": 1}, ["warning: components.data.slurm.partition 'old' was DRAIN"]),
        ({"partition": "cpu"}, ["error: components.data.slurm.partition 'cpu' is not on cluster 'alps'"]),
        (
            {"partition": "spot", "nodes": 2, "gpus_per_node": 9},
            ["error: components.data.slurm.gpus_per_node 9 requests 9 GPUs"],
        ),
        ({"account": "none"}, ["error: components.data.slurm.account 'none'"]),
        (
            {"nodes": 9},
            ["set components.data.slurm.nodes to 8", "components and the ranks together need 17 nodes of partition"],
        ),
        ({"nodes": 8}, []),
        ({"partition": "debug", "qos": "debug"}, ["error: slurm.time 01:00:00 is longer than partition 'debug'"]),
    ],
)  # fmt: skip
def test_components_are_checked_like_jobs(slurm: dict[str, Any], expected: list[str]) -> None:
    data = {"entrypoint": {"command": ["true"]}, "slurm": slurm}
    found = said({"partition": "gpu", "nodes": 8}, components={"data": data})
    assert len(found) == len(expected), found
    for line, words in zip(found, expected, strict=True):
        assert words in line


def test_unknown_facts_give_no_finding() -> None:
    empty = SiteFacts(name="alps", probed_at=NOW, slurm_version="23.11.4")
    wild = {**GOOD, "partition": "x", "account": "y", "qos": "z", "nodes": 4000, "time": "90-0", "constraint": "q"}
    assert said(wild, site=empty, tasks=10**6) == []


def test_accounts_are_not_checked_unless_slurm_enforces_them() -> None:
    lax = facts(config={**CONFIG, "accounting_enforce": []})
    assert said(
        {**GOOD, "account": "nobody's", "qos": "none", "nodes": 7, "gpus_per_node": 4, "mem": None}, site=lax
    ) == [
        "error: slurm.nodes 7 is more than the number of nodes in partition 'gpu' that have 4 GPUs, 32 CPUs "
        "(6): set slurm.nodes to 6 [facts of alps, 3 days old]"
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"partition": "gpuu"},
            "slurm.partition 'gpuu' is not on cluster 'alps' (has: gpu, debug, spot, cancelling, vip, old). "
            "Did you mean 'gpu'?",
        ),
        ({"account": "mll"}, "slurm.account 'mll' is not one of your accounts (yours: ml). Did you mean 'ml'?"),
        ({"qos": "debg"}, "slurm.qos 'debg' is not on cluster 'alps' (has: normal, debug). Did you mean 'debug'?"),
        ({"partition": "vip"}, "slurm.account 'ml' is not allowed in partition 'vip' (allowed: chiefs)"),
        (
            {"time": "2-00:00:00"},
            "slurm.time 2-00:00:00 is longer than partition 'gpu' allows (at most 1-00:00:00): set "
            "slurm.time to 1-00:00:00",
        ),
        ({"nodes": 9}, "slurm.nodes 9 is more than partition 'gpu' allows (at most 8): set slurm.nodes to 8"),
        (
            {"gpus_per_node": "a100:8"},
            "slurm.gpus_per_node a100:8 requests 8 a100 GPUs per node, but no node in partition 'gpu' has "
            "more than 4 GPUs",
        ),
        (
            {"gpus_per_node": "h100:4"},
            "slurm.gpus_per_node h100:4 requests 4 h100 GPUs per node, but partition 'gpu' has no such GPUs"
            " (has: a100, v100)",
        ),
        (
            {"cpus_per_task": 32},
            "slurm.cpus_per_task 32 requests 128 CPUs per node, but no node in partition 'gpu' has more "
            "than 64 CPUs: request at most 64 CPUs",
        ),
        (
            {"mem": "800G"},
            "slurm.mem 800G requests 800G of memory per node, but no node in partition 'gpu' has more than 500G",
        ),
        (
            {"gpus_per_node": "v100:2", "cpus_per_task": 30},
            "slurm.gpus_per_node v100:2: no node in partition 'gpu' has all of 2 v100 GPUs, 60 CPUs, 400G of memory (",
        ),
        (
            {"constraint": "a100&opa"},
            "slurm.constraint 'a100&opa': no node in partition 'gpu' has feature 'opa' (features: a100, ib, v100)",
        ),
        (
            {"constraint": "v100&ib"},
            "slurm.constraint 'v100&ib': no node in partition 'gpu' has all of the features v100, ib",
        ),
        (
            {"nodes": 7},
            "slurm.nodes 7 with 4 GPUs each is 28 GPUs, more than QOS 'normal' allows per job (at most 24): set "
            "slurm.nodes to 6",
        ),
    ],
)
def test_error_gives_value_allowed_values_and_age_of_the_facts(changes: dict[str, Any], expected: str) -> None:
    lines = said({**GOOD, **changes})
    assert any(line.startswith(f"error: {expected}") for line in lines), lines
    assert all(line.endswith("[facts of alps, 3 days old]") for line in lines)


def limited(**limits: Any) -> SiteFacts:
    """Facts with more limits on partition gpu, its QOS, the job's QOS or the account."""
    partition = {**PARTITIONS[0], **limits.get("partition", {})}
    account = {
        "account": "ml",
        "default": True,
        "qos": ["normal"],
        "default_qos": "normal",
        **limits.get("account", {}),
    }
    qos = [{"name": "normal", **limits.get("qos", {})}, {"name": "of-gpu", **limits.get("of_gpu", {})}]
    return facts(partitions=[partition], accounts=[account], qos=qos)


@pytest.mark.parametrize(
    ("limits", "within", "beyond", "expected"),
    [
        (
            {"qos": {"max_wall_minutes": 60}},
            {"time": 60},
            {"time": 61},
            "slurm.time 01:01:00 is longer than QOS 'normal' allows (at most 01:00:00): set slurm.time to 01:00:00",
        ),
        (
            {"account": {"max_wall_minutes": 60}},
            {"time": 60},
            {"time": 90},
            "slurm.time 01:30:00 is longer than account 'ml' allows (at most 01:00:00)",
        ),
        (
            {"partition": {"qos": "of-gpu"}, "of_gpu": {"max_wall_minutes": 30}, "qos": {"max_wall_minutes": 600}},
            {"time": 30},
            {"time": 40},
            "slurm.time 00:40:00 is longer than QOS 'of-gpu' allows (at most 00:30:00)",
        ),
        (
            {"qos": {"max_nodes": 1}},
            {"nodes": 1},
            {"nodes": 2},
            "slurm.nodes 2 is more than QOS 'normal' allows (at most 1): set slurm.nodes to 1",
        ),
        (
            {"partition": {"min_nodes": 2}},
            {"nodes": 2},
            {"nodes": 1},
            "slurm.nodes 1 is less than the minimum of partition 'gpu' (2): set slurm.nodes to 2",
        ),
        (
            {"account": {"max_tres": {"gres/gpu": "4"}}},
            {"nodes": 1},
            {"nodes": 2},
            "slurm.nodes 2 with 4 GPUs each is 8 GPUs, more than account 'ml' allows per job (at most 4): set "
            "slurm.nodes to 1",
        ),
        (
            {"qos": {"max_tres": {"cpu": "32"}}},
            {"nodes": 1},
            {"nodes": 2},
            "slurm.nodes 2 with 32 CPUs each is 64 CPUs, more than QOS 'normal' allows per job (at most 32)",
        ),
        (
            {"partition": {"max_cpus_per_node": 32}},
            {"cpus_per_task": 8},
            {"cpus_per_task": 9},
            "slurm.cpus_per_task 9 requests 36 CPUs per node, but no node in partition 'gpu' has more than 32 CPUs",
        ),
        (
            {"partition": {"max_cpus_per_node": 3}},
            {"cpus_per_task": None, "gpus_per_node": "a100:3"},
            {"cpus_per_task": None},
            "slurm.gpus_per_node a100:4 requests 4 CPUs per node, but no node in partition 'gpu' has more than 3 CPUs",
        ),
        (
            {"partition": {"max_cpus_per_node": 32}},
            {"cpus_per_task": None, "gpus_per_node": None, "cpus_per_gpu": 1, "ntasks_per_node": 32},
            {"cpus_per_task": None, "gpus_per_node": None, "cpus_per_gpu": 1, "ntasks_per_node": 33},
            "slurm.ntasks_per_node 33 requests 33 CPUs per node, but no node in partition 'gpu' has more than 32 CPUs",
        ),
        (
            {"partition": {"max_mem_per_node_mb": 400 * 1024}},
            {"mem": "400G"},
            {"mem": "401G"},
            "slurm.mem 401G requests 401G of memory per node, but no node in partition 'gpu' has more than 400G",
        ),
        (
            {"partition": {"deny_accounts": ["ML"]}, "account": {"default": False}},
            {},
            {"account": "ml"},
            "slurm.account 'ml' is denied in partition 'gpu': use another account",
        ),
        (
            {"partition": {"allow_qos": ["normal"]}, "account": {"qos": ["normal", "of-gpu"]}},
            {"qos": "normal"},
            {"qos": "of-gpu"},
            "slurm.qos 'of-gpu' is not allowed in partition 'gpu' (allowed: normal)",
        ),
        (
            {"account": {"partition": "gpu", "qos": ["normal"]}},
            {"account": "ml", "qos": "normal"},
            {"account": "ml", "qos": "of-gpu"},
            "slurm.qos 'of-gpu' is not allowed for account 'ml' (allowed: normal)",
        ),
    ],
)
def test_limits_of_partition_qos_and_account_are_checked(
    limits: dict[str, Any], within: dict[str, Any], beyond: dict[str, Any], expected: str
) -> None:
    site = limited(**limits)
    assert said({**GOOD, **within}, site=site) == []
    lines = said({**GOOD, **beyond}, site=site)
    assert any(line.startswith(f"error: {expected}") for line in lines), lines


def test_partition_restricted_to_root_or_groups_is_refused() -> None:
    rooted = [{**PARTITIONS[0], "root_only": True}]
    (line,) = said(GOOD, site=facts(partitions=rooted))
    assert line.startswith("error: slurm.partition 'gpu' is restricted to root: use another partition")
    grouped = facts(partitions=[{**PARTITIONS[0], "allow_groups": ["bio"]}], groups=["ada", "ml"])
    (line,) = said(GOOD, site=grouped)
    expected = "error: slurm.partition 'gpu' is restricted to AllowGroups=bio, and you are not a member: use another"
    assert line.startswith(expected)
    assert said(GOOD, site=grouped.model_copy(update={"groups": ["bio"]})) == []


def test_too_many_nodes_are_reported_once() -> None:
    (line,) = said(
        {**GOOD, "partition": "debug", "qos": "debug", "nodes": 3, "gpus_per_node": 2, "mem": None, "time": 9}
    )
    assert line.startswith("error: slurm.nodes 3 is more than partition 'debug' has (2): set slurm.nodes to 2")


def test_limit_of_one_among_several_partitions_is_a_warning() -> None:
    (line,) = said({**GOOD, "partition": "gpu,spot", "time": "2-00:00:00", "qos": None})
    assert line.startswith("warning: slurm.time 2-00:00:00 is longer than partition 'gpu' allows")


def test_drained_partition_is_a_warning() -> None:
    (line,) = said({"partition": "old"})
    assert line.startswith(
        "warning: slurm.partition 'old' was DRAIN when the cluster was probed: it accepts no new jobs"
    )


def test_array_above_max_array_size_is_reported() -> None:
    assert said(GOOD, tasks=1001) == []
    (line,) = said(GOOD, tasks=1002)
    assert "the array of 1002 tasks is larger than cluster 'alps' allows (at most 1001, MaxArraySize)" in line


def test_array_above_the_submit_limit_is_a_warning() -> None:
    site = limited(qos={"max_submit": 10})
    assert said(GOOD, tasks=10, site=site) == []
    (line,) = said(GOOD, tasks=11, site=site)
    expected = (
        "warning: the array of 11 tasks has more jobs than QOS 'normal' allows in the queue at a time (at most 10)"
    )
    assert line.startswith(expected)


SLOW = History(run_id="r", checkpoint_bytes=20 * 10**9, checkpoint_files=40, save_seconds=41, step_seconds=1.5)


def test_preemption_without_time_to_save_is_a_warning() -> None:
    (line,) = said({**GOOD, "partition": "spot"}, history=SLOW, checkpoint={"keep": 1})
    assert line.startswith(
        "warning: checkpoint.every_steps 500, about 12 minutes: preemption in partition 'spot' leaves too little "
        "time to finish a step and save (GraceTime 0 s, KillWait 30 s; the slowest save of the last run took 41 s), "
        "so the steps since the last checkpoint would be lost"
    )
    quick = History(run_id="r", save_seconds=4)
    assert said({**GOOD, "partition": "spot"}, history=quick) == []
    assert said({**GOOD, "partition": "gpu", "account": "ml"}, history=quick) == []


def test_preemption_without_chain_or_requeue_is_a_warning() -> None:
    (line,) = said({**GOOD, "partition": "cancelling"})
    assert line.startswith("warning: resilience.chain null: partition 'cancelling' preempts by cancelling")
    assert said({**GOOD, "partition": "cancelling"}, resilience={"chain": 5}) == []
    # JobRequeue=0 is only a default, which --requeue overrides
    assert said({**GOOD, "partition": "spot"}) == []
    (line,) = said({**GOOD, "partition": "spot"}, resilience={"requeue": False})
    assert line.startswith("warning: resilience.requeue false: preemption in partition 'spot' (PreemptMode=REQUEUE)")
    assert said({**GOOD, "partition": "spot", "time": 15}, resilience={"requeue": False}) == []
    assert said({**GOOD, "partition": "vip", "account": "chiefs"}, site=OPEN, resilience={"requeue": False}) == []


@pytest.mark.parametrize(("known", "refused"), [(False, True), (True, False), (None, False)])
def test_expedited_requeue_is_refused_where_it_is_disabled(known: bool | None, refused: bool) -> None:
    spec = spec_from_values(
        {"name": "x", "entrypoint": {"command": ["true"]}, "resilience": {"requeue": "expedite"}}, base=Path()
    )
    site = facts(config={**CONFIG, "expedited_requeue": known})
    errors = [str(one) for one in check_site(spec, site, now=NOW) if one.is_error]
    assert any("enable_expedited_requeue" in one for one in errors) is refused, errors


def test_qos_that_is_preempted_by_cancelling_is_a_warning() -> None:
    by_qos = {**CONFIG, "preempt_type": "preempt/qos"}
    qos = [{"name": "normal", "preempt_mode": "cancel", "grace_seconds": 60}, {"name": "high", "preempts": ["normal"]}]
    (line,) = said({**GOOD, "partition": "spot"}, site=facts(config=by_qos, qos=qos))
    assert "preempts by cancelling (PreemptMode=CANCEL)" in line
    assert "a job that is still running after its grace time is not requeued" in line
    alone = [{"name": "normal", "preempt_mode": "cancel"}, {"name": "high"}]
    assert said({**GOOD, "partition": "spot"}, site=facts(config=by_qos, qos=alone)) == []


def test_grace_time_counts_as_time_to_save() -> None:
    kind = [{**PARTITIONS[2], "grace_seconds": 60}, PARTITIONS[4]]
    assert said({**GOOD, "partition": "spot"}, history=SLOW, checkpoint={"keep": 1}, site=facts(partitions=kind)) == []


def test_partition_with_the_highest_priority_is_not_preempted() -> None:
    top = [{**PARTITIONS[3], "priority_tier": 9}]
    assert said({**GOOD, "partition": "cancelling"}, site=facts(partitions=top)) == []


def test_checkpoints_above_the_space_quota_are_reported() -> None:
    large = History(run_id="r", checkpoint_bytes=20 * 10**9, checkpoint_files=40)
    (line,) = said(GOOD, history=large, checkpoint={"keep": 3})
    assert "warning: checkpoint.keep 3 needs 80.0 GB, including the next checkpoint" in line
    assert "/scratch/me has space for 60.0 GB (limit: 100.0 GB): set checkpoint.keep to 2" in line
    (line,) = said(GOOD, history=large, checkpoint={"keep": 9})
    assert line.startswith("error: checkpoint.keep 9")
    assert said(GOOD, history=large, checkpoint={"keep": 2}) == []


def test_checkpoints_above_the_file_quota_are_reported() -> None:
    many = History(run_id="r", checkpoint_bytes=10**6, checkpoint_files=400)
    quota = [{"path": "/scratch", "bytes_limit": 10**12, "inodes_limit": 2000, "inodes_used": 500}]
    assert said(GOOD, history=many, checkpoint={"keep": 2}, site=facts(quota=quota)) == []
    (line,) = said(GOOD, history=many, checkpoint={"keep": 3}, site=facts(quota=quota))
    assert line.startswith("warning: checkpoint.keep 3 needs 1600 files, including the next checkpoint")
    assert "/scratch has space for 1500 files (limit: 2000 files): set checkpoint.keep to 2" in line
    (line,) = said(GOOD, history=many, checkpoint={"keep": 6}, site=facts(quota=quota))
    assert line.startswith("error: checkpoint.keep 6")
    (line,) = said(GOOD, history=many, checkpoint={"keep": None}, site=facts(quota=quota))
    assert line.startswith("warning: checkpoint.keep null keeps all checkpoints, but there is space for only 3 more")
    assert "uses 400 files" in line


def test_error_names_the_line_of_the_spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcaccel.spec import load_spec

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store_facts(facts())
    file = tmp_path / "job.yaml"
    (tmp_path / "train.py").touch()
    file.write_text("name: gpt\nentrypoint: {script: train.py}\nslurm:\n  partition: gpuu\n")
    profile = ClusterProfile(name="alps")
    with pytest.raises(SpecError) as error:
        advice_or_refusal(load_spec(file), profile)
    assert error.value.problems[0].startswith(f"{file}:4: slurm.partition 'gpuu' is not on cluster")
    assert "hpcaccel cluster probe alps" in error.value.hints[0]
    assert advice_or_refusal(load_spec(file), ClusterProfile(name="other")) is None
