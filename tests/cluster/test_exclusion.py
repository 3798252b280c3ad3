"""Exclusion of faulty nodes on a real Slurm, which cannot exclude a node from a running job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]

BROKEN_AT_FIRST = """
import os
print("on", os.environ["SLURMD_NODENAME"], flush=True)
if os.environ["HPCACCEL_ATTEMPT"] == "1" and os.environ["SLURM_NODEID"] == "0":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


@pytest.fixture
def scenario(cluster: Cluster, tmp_path: Path) -> Scenario:
    """Without a list of nodes: nodes requested by name cannot be excluded."""
    return Scenario(cluster, tmp_path)


def others(cluster: Cluster, leased: list[str]) -> str:
    return ",".join(node for node in cluster.nodes if node not in leased)


@pytest.mark.chaos
def test_broken_node_is_excluded_when_the_job_is_requeued(cluster: Cluster, lease: Lease, scenario: Scenario) -> None:
    nodes = lease(2)
    program = scenario.folder / "broken.py"
    program.write_text(BROKEN_AT_FIRST)
    scenario.submit(
        {
            "entrypoint": {"script": str(program)},
            "runtime": {"stop": "signals"},
            "slurm": {"nodes": 1, "gpus_per_node": 1, "exclude": others(cluster, nodes)},
            "resilience": {"max_failures": 1},
        }
    )
    assert scenario.wait_until_over() == 0, scenario.story
    first, second = (line["nodes"] for line in scenario.lines("start"))
    assert set(first + second) == set(nodes), scenario.story
    end = scenario.lines("end")[0]
    assert (end["error_class"], end["decision"]) == ("gpu_error", "requeue")
    assert end["nodes_blamed"] == end["nodes_excluded"] == first
    (evidence,) = json.loads(scenario.dir.excluded_nodes.read_text())["nodes"]
    assert (evidence["node"], evidence["why"], evidence["attempt"]) == (first[0], "gpu_error", 1)
    excluded = cluster.run("scontrol", "show", "hostnames", cluster.job(scenario.job_id)["ExcNodeList"]).stdout.split()
    assert set(excluded) == {*cluster.nodes} - set(second)


@pytest.mark.chaos
def test_ranks_restart_on_a_spare_node_of_the_allocation(cluster: Cluster, lease: Lease, scenario: Scenario) -> None:
    nodes = lease(2)
    scenario.nodes = nodes
    program = scenario.folder / "broken.py"
    program.write_text(BROKEN_AT_FIRST)
    spec = {
        "entrypoint": {"script": str(program)},
        "runtime": {"stop": "signals"},
        "slurm": {"nodes": 2, "gpus_per_node": 1, "extra": {"hold": True}},
    }
    scenario.submit(spec)
    document = json.loads(scenario.dir.spec.read_text())
    document["launch"]["nodes"] = 1  # the job requests one more node than the ranks need
    scenario.dir.spec.write_text(json.dumps(document))
    cluster.run("scontrol", "release", scenario.job_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert [line["nodes"] for line in scenario.lines("start")] == [nodes[:1], nodes[1:]]
    assert [line["restart_count"] for line in scenario.lines("start")] == [0, 0]
    assert scenario.dir.rank_log(2, 0).read_text() == f"on {nodes[1]}\n"


@pytest.mark.chaos
def test_node_that_fails_the_preflight_checks_gets_no_ranks(cluster: Cluster, lease: Lease, scenario: Scenario) -> None:
    nodes = lease(3)
    programs = scenario.folder / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(
        f"""#!/bin/sh
        case $1 in *remapped*) exit 0;; esac
        [ "$SLURMD_NODENAME" = {nodes[1]} ] && errors=7 || errors=0
        echo "0, 00000000:3B:00.0, 0, No"
        echo "1, 00000000:5E:00.0, $errors, No"
        """
    )
    (programs / "nvidia-smi").chmod(0o755)
    program = scenario.folder / "says.py"
    program.write_text("import os; print('on', os.environ['SLURMD_NODENAME'])")
    scenario.submit(
        {
            "entrypoint": {"script": str(program)},
            "runtime": {"stop": "signals"},
            "environment": {"python": sys.executable, "setup": [f"export PATH={programs}:$PATH"]},
            "slurm": {"nodes": 2, "gpus_per_node": 2, "exclude": others(cluster, nodes)},
            "resilience": {"preflight": "full", "max_failures": 1},
        }
    )
    assert scenario.wait_until_over() == 0, scenario.story
    end, last = scenario.lines("end")
    assert (end["error_class"], end["decision"], end["nodes_excluded"]) == ("preflight", "requeue", [nodes[1]])
    assert "uncorrectable ECC errors since the driver was loaded: 7" in end["detail"]
    assert not scenario.dir.rank_log(1, 0).exists()
    assert scenario.lines("start")[1]["nodes"] == [nodes[0], nodes[2]]
    assert end["preflight_seconds"] < 30
    checked = json.loads((scenario.dir.attempt(2) / "preflight.json").read_text())
    assert (checked["mode"], checked["nodes"], checked["together"]) == ("full", {nodes[0]: [], nodes[2]: []}, "")
    assert last["preflight_seconds"] == checked["seconds"]
