"""Warm restarts on a real Slurm: the step and its parents stay, and the training is the undisturbed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .injectors import pid_of, taken_away
from .scenario import Scenario

Lease = Callable[[int], list[str]]
PAUSE = ("--pause", "0.25")
WARM = {"warm_restart": "auto"}

pytestmark = pytest.mark.chaos


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_warm(scenario: Scenario) -> None:
    log = scenario.dir.supervisor_log(1)
    scenario._wait(lambda: log.exists() and "warm parents have imported torch" in log.read_text(), "warm parents")


def test_killed_rank_restarts_in_its_step_without_imports(
    scenario: Scenario, assert_exact: Callable[..., None]
) -> None:
    scenario.train(*PAUSE, checkpoint={"every_steps": 5}, resilience=WARM)
    scenario.wait_for_checkpoint()
    wait_until_warm(scenario)
    pid = pid_of(scenario, 3)
    parent, step = parent_of(pid), scenario.step
    os.kill(pid, signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    end = scenario.lines("end")[0]
    assert (end["error_class"], end["detail"]) == ("killed", f"rank 3 on {scenario.nodes[1]}: Killed"), scenario.story
    assert scenario.step == step
    assert parent != parent_of(os.getpid())
    assert_exact(scenario)


def test_killed_parent_is_followed_by_a_new_step(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    scenario.train(*PAUSE, checkpoint={"every_steps": 5}, resilience=WARM)
    scenario.wait_for_checkpoint()
    step = scenario.step
    os.kill(parent_of(pid_of(scenario, 1)), signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    assert scenario.step != step
    assert_exact(scenario)


def test_lost_node_requeues_the_job(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    assert scenario.cluster is not None
    scenario.train(*PAUSE, checkpoint={"every_steps": 5}, resilience=WARM)
    scenario.wait_for_checkpoint()
    with taken_away(scenario.cluster, scenario.nodes[1]):
        scenario.wait_for_ends(1)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends[-1] == ("completed", "end"), scenario.story
    assert scenario.lines("end")[0]["decision"] == "requeue", scenario.story
    assert_exact(scenario)


def test_killed_supervisor_is_followed_by_new_ranks(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    scenario.train(*PAUSE, checkpoint={"every_steps": 5}, resilience=WARM)
    scenario.wait_for_checkpoint()
    wait_until_warm(scenario)
    parent = parent_of(pid_of(scenario, 0))
    lease = scenario.dir.lease.read_text()
    import json

    os.kill(json.loads(lease)["pid"], signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("lost", "restart"), ("completed", "end")], scenario.story
    assert not Path(f"/proc/{parent}").exists()
    assert_exact(scenario)


def test_preempted_run_loses_no_step(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    scenario.train(*PAUSE, resilience=WARM)
    scenario.wait_for_step(8)
    scenario.preempt()
    assert scenario.wait_until_over() == 0
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert_exact(scenario)
