"""Bit-exact resume: whatever ends an attempt, losses and weights equal those of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]
Exact = Callable[..., None]
PAUSE = ("--pause", "0.25")


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


@pytest.mark.parametrize(
    ("strategy", "partition"),
    [
        ("fsdp", "gpu"),
        pytest.param("ddp", "gpu0", marks=pytest.mark.chaos),
        pytest.param("ddp", "gpu", marks=pytest.mark.chaos),
        pytest.param("fsdp", "gpu0", marks=pytest.mark.chaos),
    ],
)
def test_run_preempted_by_an_urgent_job_is_bit_exact(
    scenario: Scenario, assert_exact: Exact, strategy: str, partition: str
) -> None:
    scenario.train(*PAUSE, runtime={"strategy": strategy}, slurm={"partition": partition})
    scenario.wait_for_step(8)
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    status = scenario.status()
    assert (status["state"], status["attempts"], status["steps_lost"]) == ("completed", 2, 0)
    assert_exact(scenario, strategy=strategy)


@pytest.mark.chaos
def test_run_beyond_its_time_limit_is_bit_exact(scenario: Scenario, assert_exact: Exact) -> None:
    # Slurm's warning comes up to a minute early, and its shortest limit is a minute. The steps take 132 s: more than an
    # attempt of 120 s has, and less than two have, each of which may take 50 s to start on a busy machine.
    scenario.train("--pause", "3.3", slurm={"time": 3}, resilience={"warning_seconds": 60})
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("time_limit", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert_exact(scenario)


@pytest.mark.chaos
def test_run_stopped_with_requeue_is_bit_exact(scenario: Scenario, assert_exact: Exact) -> None:
    scenario.train(*PAUSE)
    scenario.wait_for_step(8)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert_exact(scenario)


@pytest.mark.chaos  # a preemption, a stop and a resume of one run: test_remote.py
def test_run_stopped_and_later_resumed_is_bit_exact(scenario: Scenario, assert_exact: Exact) -> None:
    scenario.train(*PAUSE)
    scenario.wait_for_step(8)
    scenario.cli("stop", scenario.dir.run_id)
    assert scenario.wait_until_over() == 85, scenario.story
    assert scenario.status()["state"] == "paused"
    assert len(scenario.losses) < 40
    scenario.cli("resume", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "pause"), ("completed", "end")], scenario.story
    assert_exact(scenario)


@pytest.mark.chaos
def test_run_with_sigterm_during_start_up_is_bit_exact(
    cluster: Cluster, scenario: Scenario, assert_exact: Exact
) -> None:
    scenario.train("--start-pause", "2")
    for rank in range(4):
        scenario.wait_for_word("starting", rank=rank)
    cluster.run("scancel", "--signal=TERM", scenario.step)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story
    assert_exact(scenario)


@pytest.mark.chaos
def test_run_with_a_killed_rank_is_bit_exact(scenario: Scenario, assert_exact: Exact) -> None:
    scenario.train(*PAUSE)
    scenario.wait_for_step(20)
    os.kill(int(scenario.wait_for_word("starting", rank=3).split()[1]), signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    assert [line["restart_count"] for line in scenario.lines("start")] == [0, 0]  # the same allocation
    lost = scenario.status()["steps_lost"]
    assert scenario.lines("end")[1]["resumed_step"] == 15  # the last commit
    assert 0 < lost <= 15
    assert_exact(scenario)


@pytest.mark.chaos  # a stop of a training on this machine, which resumes without losing a step: tests/test_readme.py
def test_local_backend_gives_the_same_losses_and_weights(tmp_path: Path, lease: Lease, assert_exact: Exact) -> None:
    run = Scenario(None, tmp_path)
    run.train(*PAUSE)
    run.wait_for_step(8)
    run.cli("stop", "--requeue", run.dir.run_id)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("stop", "requeue"), ("completed", "end")], run.story
    assert_exact(run, nodes=lease(2))
