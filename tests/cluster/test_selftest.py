"""``hpcaccel test`` on a real Slurm: as a job, inside an allocation, and with a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_lines
from tests.remote.login_node import LoginNode, why_no_sshd

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.fixture
def run(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


def words(run: Scenario) -> list[str]:
    settings = ["partition=gpu", f"nodelist={','.join(run.nodes)}", "cpus_per_task=1", "mem=4G"]
    return ["test", "--nodes", "2", "--gpus-per-node", "1", "--json", *(f"slurm.{one}" for one in settings)]


def states(document: dict[str, Any]) -> dict[str, list[str]]:
    return {name: list(check["states"]) for name, check in document["checks"].items() if name != "gpus"}


def test_job_tests_each_node_and_the_link_between_them(run: Scenario) -> None:
    answer = run.cli(*words(run), check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads(answer.stdout)
    assert {name: node["ranks"] for name, node in document["nodes"].items()} == {
        node: [rank] for rank, node in enumerate(run.nodes)
    }
    assert set(map(tuple, states(document).values())) == {("ok",)}, document["checks"]
    (link,) = document["links"]
    assert link["nodes"] == run.nodes
    run_id = answer.stderr.split("submitted ")[1].split()[0]
    again = run.cli("test", "--report", run_id)
    rows = [line.split()[:3] for line in again.stdout.splitlines()[1:3]]
    assert rows == [[run.nodes[0], "0", "ok"], [run.nodes[1], "1", "ok"]]


def test_test_inside_an_allocation_runs_on_its_nodes(run: Scenario) -> None:
    command = ["salloc", "--partition=gpu", "--nodes=2", f"--nodelist={','.join(run.nodes)}", "--cpus-per-task=1"]
    command += ["--ntasks-per-node=1", "--mem=4G", "--time=10", "--quiet"]
    answer = subprocess.run(
        [*command, sys.executable, "-m", "hpcaccel", "test", "--json"],
        env=run.env, cwd=run.folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads(answer.stdout)
    assert list(document["nodes"]) == run.nodes
    assert set(map(tuple, states(document).values())) == {("ok",)}, document["checks"]


def test_killed_rank_is_named_with_its_node_and_check(run: Scenario) -> None:
    testing = subprocess.Popen(
        [sys.executable, "-m", "hpcaccel", *words(run), "--timeout", "10"],
        env=run.env, cwd=run.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    pids: list[int] = []

    def stopped_in_a_check() -> bool:
        for file in run.folder.glob("runs/selftest/*/selftest/rank-1.*.jsonl"):
            pids[:] = [line["pid"] for line, _ in read_lines(file)]
            if pids:
                os.kill(pids[0], signal.SIGSTOP)
                if [line["state"] for line, _ in read_lines(file)][-1] in ("began", "step"):
                    return True
                os.kill(pids[0], signal.SIGCONT)
        return False

    wait_until(stopped_in_a_check, "a check of rank 1")
    os.kill(pids[0], signal.SIGKILL)
    output, _ = testing.communicate(timeout=300)
    assert testing.returncode == 1, output
    document = json.loads(output[output.index("{") :].rpartition("}")[0] + "}")
    bad = {name: node["problems"] for name, node in document["nodes"].items() if node["verdict"] == "bad"}
    assert list(bad) == [run.nodes[1]], output
    assert "rank 1 was killed by SIGKILL during the check" in bad[run.nodes[1]][0]["message"]


@pytest.mark.chaos
def test_test_of_a_cluster_behind_ssh_prints_the_verdict_here(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    (name,) = lease(1)
    node = LoginNode(tmp_path / "login", path=cluster.login_path, env={"SLURM_CONF": cluster.env["SLURM_CONF"]})
    node.start()
    try:
        node.hpcaccel("cluster", "add", "dev", "--host", "alps", "--set", "runs_dir=~/runs")
        settings = [f"slurm.nodelist={name}", "slurm.ntasks_per_node=2", "slurm.mem=4G", "slurm.partition=gpu"]
        settings.append(f"environment.python={sys.executable}")
        answer = node.hpcaccel("test", "--cluster", "dev", "--json", *settings)
    finally:
        node.stop()
    document = json.loads(answer.stdout)
    assert {one: about["ranks"] for one, about in document["nodes"].items()} == {name: [0, 1]}
    assert document["verdict"] == "ok", document["nodes"]


def test_ranks_that_cannot_start_are_named_with_their_nodes(run: Scenario) -> None:
    answer = run.cli(*words(run), "environment.python=/nowhere/python", check=False)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    document = json.loads(answer.stdout)
    assert {name: [one["kind"] for one in node["problems"]] for name, node in document["nodes"].items()} == {
        node: ["never_started"] for node in run.nodes
    }
    assert "hpcaccel logs " in answer.stderr
