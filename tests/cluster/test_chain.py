"""Chains of jobs: the next job continues the run, and none starts ranks after the run's end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

Lease = Callable[[int], list[str]]
Exact = Callable[..., None]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


def links(run: Scenario) -> list[str]:
    found = json.loads(run.dir.record.read_text())["links"]
    assert isinstance(found, list)
    return found


def nothing_follows(cluster: Cluster, run: Scenario) -> None:
    """Every job of the chain has ended, and only those in the ledger have started ranks."""
    wait_until(lambda: not cluster.run("squeue", "--noheader", f"--jobs={','.join(links(run))}").stdout.strip(), "over")
    begun = {line["job_id"] for line in run.lines("start")}
    for job_id in set(links(run)) - begun:
        job = cluster.job(job_id)
        # A job that has started finds the run's end in the ledger, and ends with its exit code.
        found_the_end = job["JobState"] == "FAILED" and job["ExitCode"] == "130:0"
        assert job["JobState"] == "CANCELLED" or found_the_end, (job, run.story)


@pytest.mark.chaos
@pytest.mark.parametrize("partition", ["gpuc0", "gpuc"])
def test_chain_continues_after_a_preemption_by_cancel(
    cluster: Cluster, lease: Lease, tmp_path: Path, assert_exact: Exact, partition: str
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.train("--pause", "0.25", slurm={"partition": partition}, resilience={"chain": 4})
    run.wait_for_step(8)
    run.preempt()
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("preempted", "requeue"), ("completed", "end")], run.story
    assert [line["job_id"] for line in run.lines("start")] == links(run)[:2]
    status = run.status()
    assert (status["state"], status["attempts"], status["steps_lost"]) == ("completed", 2, 0)
    nothing_follows(cluster, run)
    assert_exact(run)


@pytest.mark.chaos
def test_chain_continues_after_the_time_limit(cluster: Cluster, scenario: Scenario) -> None:
    scenario.plain(
        "--wait", "--until", "1", runtime={"stop": "signals"}, slurm={"time": 1},
        resilience={"chain": 3, "warning_seconds": 20},
    )  # fmt: skip
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("time_limit", "requeue"), ("completed", "end")], scenario.story
    nothing_follows(cluster, scenario)


@pytest.mark.parametrize(
    "how",
    [
        "scancel",
        *(
            pytest.param(how, marks=pytest.mark.chaos)
            for how in ("hpcaccel cancel", "hpcaccel stop", "scancel of what waits")
        ),
    ],
)
def test_cancel_and_stop_end_the_whole_chain(cluster: Cluster, scenario: Scenario, how: str) -> None:
    scenario.plain("--wait", runtime={"stop": "signals"}, slurm={"partition": "gpuc0"}, resilience={"chain": 4})
    scenario.wait_for_word("starting")
    first, second, third = links(scenario)
    if how == "scancel":
        scenario.scancel()
    elif how == "scancel of what waits":
        cluster.run("scancel", second)
        scenario.preempt()  # preempts the first job; the third one detects the cancelled one
    else:
        scenario.cli(how.split()[1], scenario.dir.run_id)
    assert scenario.wait_until_over() == (85 if how == "hpcaccel stop" else 130), scenario.story
    wait_until(lambda: not cluster.run("squeue", "--noheader", f"--jobs={first},{third}").stdout.strip(), "all over")
    assert len(scenario.lines("start")) == 1, scenario.story
    if how == "hpcaccel stop":
        scenario.cli("resume", scenario.dir.run_id)
        scenario.wait_for_word("starting", attempt=2)
        assert len(links(scenario)) == 3
        scenario.cli("cancel", scenario.dir.run_id)
    nothing_follows(cluster, scenario)


@pytest.mark.chaos
def test_run_continues_if_sbatch_is_forbidden_on_nodes_and_logs_advice(scenario: Scenario, tmp_path: Path) -> None:
    refusal = tmp_path / "bin" / "sbatch"
    refusal.parent.mkdir()
    refusal.write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Access/permission denied' >&2\nexit 1\n"
    )
    refusal.chmod(0o755)
    environment = {"python": sys.executable, "setup": [f"export PATH={refusal.parent}:$PATH"]}
    scenario.plain(
        "--wait", "--until", "1", environment=environment, runtime={"stop": "signals"}, resilience={"chain": 5},
    )  # fmt: skip
    scenario.wait_for_word("starting")
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    log = scenario.dir.slurm_log.read_text()
    assert "Access/permission denied" in log
    assert "set resilience.chain_ahead: 4, so that `hpcaccel submit` submits all jobs" in log


@pytest.mark.chaos
def test_failure_cap_counts_all_jobs_of_the_chain(cluster: Cluster, scenario: Scenario) -> None:
    scenario.plain("--fail", resilience={"chain": 9, "restart_in_place": 0, "max_failures": 10})
    assert scenario.wait_until_over() == 1
    assert scenario.ends == [("failed", "requeue"), ("failed", "end")], scenario.story
    assert "2 failures without a new checkpoint" in scenario.status()["detail"]
    nothing_follows(cluster, scenario)


@pytest.mark.chaos
def test_last_job_of_a_chain_pauses_the_run(cluster: Cluster, scenario: Scenario) -> None:
    # A killed batch step records nothing; the next job detects it.
    scenario.plain("--wait", runtime={"stop": "signals"}, resilience={"chain": 2})
    scenario.wait_for_word("starting")
    scenario.scancel("--batch", "--signal=KILL")
    scenario.wait_for_word("starting", attempt=2)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 85, scenario.story
    assert scenario.ends == [("lost", "requeue"), ("stop", "requeue"), ("stop", "pause")], scenario.story
    assert "the last job of the chain (resilience.chain: 2)" in scenario.status()["detail"]


@pytest.mark.chaos
def test_run_whose_job_cannot_be_requeued_pauses_and_advises_a_chain(cluster: Cluster, scenario: Scenario) -> None:
    scenario.plain("--wait", runtime={"stop": "signals"})
    scenario.wait_for_word("starting")
    cluster.run("scontrol", "update", f"JobId={scenario.job_id}", "Requeue=0")
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 85, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("stop", "pause")], scenario.story
    assert "presently disabled" in scenario.status()["detail"]
    assert "resilience.chain" in scenario.status()["detail"]
