"""Warm restarts on a real Slurm: the step and its parents stay, and the training is the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .injectors import pid_of, taken_away
from .scenario import Scenario

Lease = Callable[[int], list[str]]

pytestmark = pytest.mark.chaos


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The training makes a step a second as long as this file exists."""
    path = tmp_path / "slow"
    path.touch()
    return path


def train(scenario: Scenario, slow: Path, *, warm: bool = True) -> None:
    """Submit the training, and wait until a checkpoint is committed and all parents have imported torch."""
    words = ("--epochs", "4", "--pause", "3", "--while-there", str(slow))
    resilience = {"warm_restart": "auto" if warm else "off"}
    scenario.train(*words, checkpoint={"every_steps": 3}, resilience=resilience)
    scenario.wait_for_checkpoint()
    if not warm:
        return
    log = scenario.dir.supervisor_log(1)
    scenario._wait(lambda: log.exists() and "warm parents have imported" in log.read_text(), "warm parents")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_killed_rank_restarts_in_its_step_without_imports(
    scenario: Scenario, slow: Path, assert_exact: Callable[..., None]
) -> None:
    train(scenario, slow)
    pid = pid_of(scenario, 3)
    step = scenario.step
    os.kill(pid, signal.SIGKILL)
    slow.unlink()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    end = scenario.lines("end")[0]
    assert (end["error_class"], end["detail"]) == ("killed", f"rank 3 on {scenario.nodes[1]}: Killed"), scenario.story
    assert scenario.step == step
    assert_exact(scenario)


def test_without_warm_parents_the_other_ranks_do_not_live_until_slurm_kills_them(
    scenario: Scenario, slow: Path, assert_exact: Callable[..., None]
) -> None:
    train(scenario, slow, warm=False)
    step = scenario.step
    os.kill(pid_of(scenario, 3), signal.SIGKILL)
    slow.unlink()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    message = f"{scenario.nodes[1]}: task 3: Killed: ranks that are left are killed in 2 s, unless a stop is requested"
    assert message in scenario.dir.supervisor_log(1).read_text()
    assert scenario.lines("end")[0]["detail"] == f"rank 3 on {scenario.nodes[1]}: Killed", scenario.story
    assert scenario.step != step
    assert_exact(scenario)


def test_killed_parent_is_followed_by_a_new_step(
    scenario: Scenario, slow: Path, assert_exact: Callable[..., None]
) -> None:
    train(scenario, slow)
    step = scenario.step
    os.kill(parent_of(pid_of(scenario, 1)), signal.SIGKILL)
    slow.unlink()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    assert scenario.step != step
    assert_exact(scenario)


def test_lost_node_requeues_the_job(scenario: Scenario, slow: Path, assert_exact: Callable[..., None]) -> None:
    assert scenario.cluster is not None
    train(scenario, slow)
    with taken_away(scenario.cluster, scenario.nodes[1]):
        slow.unlink()
        scenario.cluster.wait_for(scenario.job_id, ["PENDING"])
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends[0] in [("lost", "requeue"), ("failed", "restart")], scenario.story
    assert scenario.ends[-1] == ("completed", "end"), scenario.story
    assert_exact(scenario)


def test_killed_supervisor_is_followed_by_new_ranks(
    scenario: Scenario, slow: Path, assert_exact: Callable[..., None]
) -> None:
    train(scenario, slow)
    parent = parent_of(pid_of(scenario, 0))
    os.kill(json.loads(scenario.dir.lease.read_text())["pid"], signal.SIGKILL)
    slow.unlink()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("lost", "restart"), ("completed", "end")], scenario.story
    assert not Path(f"/proc/{parent}").exists()
    assert_exact(scenario)


def test_preempted_run_loses_no_step(scenario: Scenario, slow: Path, assert_exact: Callable[..., None]) -> None:
    train(scenario, slow)
    scenario.preempt()
    slow.unlink()
    assert scenario.wait_until_over() == 0
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert_exact(scenario)
