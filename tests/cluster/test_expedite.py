"""Slurm's expedited requeue, on releases that have it, and jobs of ended runs that Slurm holds in the queue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]
EXPEDITE = {"requeue": "expedite", "restart_in_place": 0, "max_failures": 1}
FIRST_RELEASE = (25, 11)


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


@pytest.fixture
def expedited(cluster: Cluster, scenario: Scenario) -> Scenario:
    if cluster.release < FIRST_RELEASE:
        pytest.skip(f"Slurm {cluster.release} has no --requeue=expedite")
    return scenario


def ended(scenario: Scenario, state: str = "COMPLETED") -> dict[str, str]:
    """Wait for the end of the job in Slurm, which must not be a hold; return the job's fields."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "REQUEUE_HOLD")
    scenario._wait(lambda: scenario.job()["JobState"] in over, f"the end of job {scenario.job_id}")
    job = scenario.job()
    assert job["JobState"] == state, scenario.story
    return job


def test_expedite_is_refused_on_a_cluster_without_it(cluster: Cluster, scenario: Scenario) -> None:
    if cluster.release >= FIRST_RELEASE:
        pytest.skip("this cluster has it")
    with pytest.raises(
        RuntimeError, match=r"resilience\.requeue 'expedite' is not supported on this cluster: it needs Slurm"
    ):
        scenario.plain(resilience=EXPEDITE)


def test_job_of_a_failed_run_is_not_held(expedited: Scenario) -> None:
    expedited.plain("--fail", resilience=EXPEDITE)
    assert expedited.wait_until_over() == 1
    assert ended(expedited)["ExitCode"] == "0:0"
    assert expedited.ends == [("failed", "end")], expedited.story


def test_job_with_a_failed_setup_is_not_held(expedited: Scenario) -> None:
    expedited.plain(resilience=EXPEDITE, environment={"setup": ["false"]})
    assert expedited.wait_until_over() == 1
    assert ended(expedited)["ExitCode"] == "0:0"


def test_preempted_run_with_expedite_is_requeued_and_completes(expedited: Scenario) -> None:
    expedited.plain("--wait", "--once", resilience=EXPEDITE, runtime={"stop": "signals"})
    expedited.wait_for_word("starting")
    expedited.preempt()
    assert expedited.wait_until_over() == 0, expedited.story
    assert expedited.ends == [("preempted", "requeue"), ("completed", "end")], expedited.story
    assert ended(expedited)["Restarts"] == "1"


@pytest.mark.chaos
def test_run_with_expedite_is_requeued_paused_resumed_and_cancelled(expedited: Scenario) -> None:
    expedited.plain("--wait", resilience=EXPEDITE, runtime={"stop": "signals"})
    expedited.wait_for_word("starting")
    expedited.cli("stop", "--requeue", expedited.dir.run_id)
    expedited.wait_for_word("starting", attempt=2)
    expedited.cli("stop", expedited.dir.run_id)
    assert expedited.wait_until_over() == 85, expedited.story
    assert ended(expedited)["ExitCode"] == "0:0"
    expedited.cli("resume", expedited.dir.run_id)
    expedited.wait_for_word("starting", attempt=3)
    expedited.job_id = expedited.status()["job_id"]
    expedited.cli("cancel", expedited.dir.run_id)
    assert expedited.wait_until_over() == 130, expedited.story
    ended(expedited, "CANCELLED")
    assert expedited.ends[-1] == ("cancelled", "end")


@pytest.mark.parametrize("then", ["cancel", pytest.param("resume", marks=pytest.mark.chaos)])
def test_job_that_slurm_holds_after_the_end_is_reported_and_cancelled(
    cluster: Cluster, scenario: Scenario, then: str
) -> None:
    scenario.plain("--fail", resilience={"restart_in_place": 0, "max_failures": 1})
    assert scenario.wait_until_over() == 1
    held = scenario.job_id
    cluster.wait_for(held, ["FAILED"])
    cluster.run("scontrol", "requeuehold", held)
    scenario._wait(lambda: cluster.job(held)["JobState"] in ("PENDING", "REQUEUE_HOLD"), "the hold")
    assert f"job {held} is still in the queue" in scenario.cli("explain", scenario.dir.run_id).stdout
    answer = scenario.cli(then, scenario.dir.run_id)
    cluster.wait_for(held, ["CANCELLED"])
    if then == "cancel":
        assert f"job {held} is still in the queue (held, " in answer.stderr
        assert scenario.status()["state"] == "failed"
        assert scenario.cli(then, scenario.dir.run_id, check=False).returncode == 2
