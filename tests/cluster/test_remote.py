"""A run on a real Slurm from a machine without Slurm, over SSH: the connection is cut at every step."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from tests.remote.login_node import LoginNode, wait_for, why_no_sshd

from .dev_cluster import Cluster, wait_until

SECRET = "planted-c0ffee-secret"
PROGRAM = """\
import os, pathlib, time
print("started" if os.environ["WANDB_API_KEY"] else "", flush=True)
while not pathlib.Path({finish!r}).exists():
    print("at work", flush=True)
    time.sleep(0.5)
"""


def test_run_over_ssh_survives_cut_connections(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    (name,) = lease(1)
    env = {"SLURM_CONF": cluster.env["SLURM_CONF"]}
    node = LoginNode(tmp_path / "login", path=cluster.login_path, env=env)
    node.start()
    try:
        _the_way(node, cluster, name)
    finally:
        node.stop()


def _the_way(node: LoginNode, cluster: Cluster, name: str) -> None:
    _made_known(node)
    finish = node.root / "finish"
    lines = ["runtime: {stop: signals}", f"environment: {{python: {sys.executable}, secrets: [WANDB_API_KEY]}}"]
    file = node.project(lines=lines)
    (file.parent / "train.py").write_text(PROGRAM.format(finish=str(finish)))
    overrides = [f"slurm.nodelist={name}", "--cluster", "dev"]
    assert "valid" in node.hpcaccel("validate", str(file), *overrides).stdout, "against the stored facts, offline"
    node.hpcaccel("validate", str(file), "slurm.partition=gpuu", *overrides[1:], code=2)
    submitted = node.hpcaccel_cut("submit", str(file), *overrides, "--json", WANDB_API_KEY=SECRET)
    said = json.loads(submitted.stdout)

    def ledger(event: str) -> list[dict[str, object]]:
        return [line for line, _ in read_lines(RunDir(said["path"]).ledger) if line["event"] == event]

    lines_seen: list[str] = []
    follower = node.start_command("logs", "-f", "toy")
    reader = threading.Thread(target=lambda: lines_seen.extend(follower.stdout or ()))
    reader.start()
    wait_for(lambda: len(lines_seen) > 2, "logs")
    assert node.cut()
    seen = len(lines_seen)
    wait_for(lambda: len(lines_seen) > seen + 1, "logs behind a cut")
    assert lines_seen.count("started\n") == 1, "where they were"

    cluster.sbatch("--partition=urgent", f"--nodelist={name}", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    wait_until(lambda: len(ledger("start")) == 2, "a second attempt, after a preemption", timeout_seconds=300)
    node.hpcaccel_cut("stop", "toy")
    wait_until(lambda: len(ledger("end")) == 2, "the end of it", timeout_seconds=300)
    assert json.loads(node.hpcaccel("status", "toy", "--json").stdout)["state"] == "paused"
    node.hpcaccel_cut("resume", "toy", WANDB_API_KEY=SECRET)
    wait_until(lambda: len(ledger("start")) == 3, "a third attempt", timeout_seconds=300)
    finish.touch()
    assert "completed" in node.hpcaccel_cut("wait", "toy").stdout
    follower.kill()
    reader.join()
    with follower:  # closes its streams
        pass
    assert len(json.loads((Path(said["path"]) / "record.json").read_text())["job_ids"]) == 2

    pulled = json.loads(node.hpcaccel_cut("pull", said["run_id"], "--json").stdout)
    here, there = Path(pulled["path"]), Path(said["path"])
    assert here.is_relative_to(node.client)
    for attempt in (1, 2, 3):
        log = Path("attempts", str(attempt), "0.log")
        assert (here / log).read_bytes() == (there / log).read_bytes()
    _keeps_the_secret(node, there)


def _made_known(node: LoginNode) -> None:
    """Add, probe and check the cluster."""
    node.hpcaccel_cut("cluster", "add", "dev", "--host", "alps", "--set", "runs_dir=~/runs")
    node.hpcaccel_cut("cluster", "probe", "dev")
    folder = node.client / ".config/hpcaccel/clusters"
    assert yaml.safe_load((folder / "dev.yaml").read_text()) == {"host": "alps", "runs_dir": "~/runs"}
    facts = yaml.safe_load((folder / "dev.facts/facts.yaml").read_text())
    assert {"gpu", "urgent"} <= {one["name"] for one in facts["partitions"]}
    assert "agrees with" in node.hpcaccel("cluster", "check", "dev").stdout


def _keeps_the_secret(node: LoginNode, run: Path) -> None:
    planted = [path for path in node.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert planted == [], "neither there nor here"
    for path in run.rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o007 == 0, f"{path} is for everybody"
