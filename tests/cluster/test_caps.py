"""Caps: a run without progress ends by itself with a reason; preemptions do not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


@pytest.mark.parametrize("restarts", [0, 2])
def test_two_failures_without_a_new_checkpoint_end_the_run(scenario: Scenario, restarts: int) -> None:
    scenario.plain("--fail", resilience={"restart_in_place": restarts, "max_failures": 10})
    assert scenario.wait_until_over() == 1
    assert scenario.ends == [("failed", "restart" if restarts else "requeue"), ("failed", "end")]
    status = scenario.status()
    assert (status["state"], status["reason"]) == ("failed", "failed")
    assert "2 failures without a new checkpoint" in status["detail"]
    assert "ValueError: this one always fails" in status["detail"]


@pytest.mark.chaos
def test_two_time_limits_without_a_new_checkpoint_end_the_run(scenario: Scenario) -> None:
    scenario.plain(
        "--wait", runtime={"stop": "signals"}, slurm={"time": 1}, resilience={"warning_seconds": 20}
    )  # fmt: skip
    assert scenario.wait_until_over() == 1
    assert scenario.ends == [("time_limit", "requeue"), ("time_limit", "end")], scenario.story
    assert "2 attempts ended by the time limit without a new checkpoint" in scenario.status()["detail"]


@pytest.mark.chaos
def test_preemptions_do_not_count_as_failures(scenario: Scenario) -> None:
    scenario.plain("--wait", "--until", "3", runtime={"stop": "signals"}, resilience={"max_failures": 1})
    for attempt in (1, 2, 3):
        scenario.wait_for_word("starting", attempt=attempt)
        scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue")] * 3 + [("completed", "end")], scenario.story
