"""The whole way from a machine without Slurm: submit, follow, a cut connection, preemption, stop, resume, pull."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remote.login_node import LoginNode, why_no_sshd

from .dev_cluster import Cluster, wait_until

PROGRAM = """\
import pathlib, time
print("started", flush=True)
while not pathlib.Path({finish!r}).exists():
    print("at work", flush=True)
    time.sleep(0.5)
"""


def test_a_run_behind_ssh(cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path) -> None:
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    (name,) = lease(1)
    node = LoginNode(tmp_path / "login", env={"SLURM_CONF": cluster.env["SLURM_CONF"]})
    node.start()
    try:
        _the_way(node, cluster, name)
    finally:
        node.stop()


def _the_way(node: LoginNode, cluster: Cluster, name: str) -> None:
    finish = node.root / "finish"
    file = node.project(lines=["runtime: {stop: signals}", f"environment: {{python: {sys.executable}}}"])
    (file.parent / "train.py").write_text(PROGRAM.format(finish=str(finish)))
    submitted = node.hpcaccel("submit", str(file), f"slurm.nodelist={name}", "--cluster", "alps", "--json")
    said = json.loads(submitted.stdout)

    def status() -> dict[str, object]:
        found: dict[str, object] = json.loads(node.hpcaccel("status", "toy", "--json").stdout)
        return found

    follower = node.start_command("logs", "-f", "toy")
    assert follower.stdout is not None
    assert [follower.stdout.readline() for _ in range(2)] == ["started\n", "at work\n"]
    assert node.cut()
    assert follower.stdout.readline() == "at work\n"

    cluster.sbatch("--partition=urgent", f"--nodelist={name}", "--exclusive", "--wrap=sleep 2")
    wait_until(lambda: status()["attempts"] == 2, "a second attempt, after a preemption", timeout_seconds=120)
    assert follower.stdout.readline() in ("at work\n", "started\n")

    node.hpcaccel("stop", "toy")
    wait_until(lambda: status()["state"] == "paused", "paused", timeout_seconds=120)
    node.hpcaccel("resume", "toy")
    finish.touch()
    assert "completed" in node.hpcaccel("wait", "toy").stdout
    follower.kill()
    follower.communicate()
    assert status()["attempts"] == 3

    pulled = json.loads(node.hpcaccel("pull", said["run_id"], "--json").stdout)
    here, there = Path(pulled["path"]), Path(said["path"])
    assert here.is_relative_to(node.client)
    for attempt in (1, 2, 3):
        log = Path("attempts", str(attempt), "0.log")
        assert (here / log).read_bytes() == (there / log).read_bytes()
