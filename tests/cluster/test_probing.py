"""Probing the development cluster, whose configuration is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.remote.login_node import LoginNode, why_no_sshd

from .dev_cluster import Cluster

pytestmark = pytest.mark.cluster


def test_probe_stores_the_facts_of_a_real_cluster(cluster: Cluster, tmp_path: Path) -> None:
    env = {**cluster.env, "XDG_CONFIG_HOME": str(tmp_path), "SCRATCH": str(tmp_path)}

    def hpcaccel(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcaccel", "cluster", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    added = hpcaccel("add", "dev", "--set", "slurm.partition=gpu")
    assert added.returncode == 0, added.stderr
    profile = yaml.safe_load((tmp_path / "hpcaccel/clusters/dev.yaml").read_text())
    assert profile == {"slurm": {"partition": "gpu"}, "runs_dir": f"{tmp_path}/hpcaccel-runs"}
    facts = yaml.safe_load((tmp_path / "hpcaccel/clusters/dev.facts/facts.yaml").read_text())
    partitions = {one["name"]: one for one in facts["partitions"]}
    assert {name: one["preempt_mode"] for name, one in partitions.items()} == {
        "gpu": "REQUEUE", "gpu0": "REQUEUE", "gpuc": "CANCEL", "gpuc0": "CANCEL", "urgent": "OFF",
    }  # fmt: skip
    assert (partitions["gpu"]["grace_seconds"], "grace_seconds" in partitions["gpu0"]) == (30, False)
    assert facts["config"]["kill_wait_seconds"] == 10
    assert facts["config"]["accounting"] is True
    (kind,) = facts["node_types"]
    assert (kind["gpus"], kind["count"]) == ({"gpu": 2}, len(cluster.nodes))
    assert [one["account"] for one in facts["accounts"]] == ["root"]
    assert [one["name"] for one in facts["qos"]] == ["normal"]
    checked = hpcaccel("check", "dev")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "profile dev agrees with the facts about its cluster" in checked.stdout


def test_probe_over_ssh_stores_the_facts_of_a_real_cluster(cluster: Cluster, tmp_path: Path) -> None:
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    node = LoginNode(tmp_path / "login", path=cluster.login_path, env={"SLURM_CONF": cluster.env["SLURM_CONF"]})
    node.start()
    try:
        node.hpcaccel("cluster", "add", "dev", "--host", "alps")
        folder = node.client / ".config/hpcaccel/clusters"
        profile = yaml.safe_load((folder / "dev.yaml").read_text())
        assert profile == {"host": "alps", "runs_dir": "~/hpcaccel-runs"}
        facts = yaml.safe_load((folder / "dev.facts/facts.yaml").read_text())
        assert (facts["host"], facts["home"], facts["config"]["kill_wait_seconds"]) == ("alps", str(node.home), 10)
        assert [one["name"] for one in facts["partitions"]] == ["gpu", "gpu0", "gpuc", "gpuc0", "urgent"]
        assert "agrees with" in node.hpcaccel("cluster", "check", "dev").stdout
    finally:
        node.stop()
