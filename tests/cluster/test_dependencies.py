"""Runs that depend on the end of others, on a real Slurm; a requeue does not start dependent runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


def say(word: str, **sections: Any) -> dict[str, Any]:
    return {"entrypoint": {"command": ["echo", word]}, **sections}


def submit_jobs(scenario: Scenario, jobs: dict[str, Any], **shared: Any) -> dict[str, RunDir]:
    slurm = {"partition": "gpu", "mem": "500M", "time": 5, "nodelist": ",".join(scenario.nodes)}
    path = scenario.folder / "jobs.yaml"
    path.write_text(yaml.safe_dump({"slurm": slurm, "runtime": {"stop": "signals"}, "jobs": jobs, **shared}))
    answer = json.loads(scenario.cli("submit", str(path), "--json").stdout)
    return {job["name"]: RunDir(job["path"]) for job in answer["jobs"]}


def times(run: RunDir) -> list[tuple[str, float]]:
    return [(line["event"], line["time"]) for line, _ in read_lines(run.ledger)]


SLOW_ONCE = ["bash", "-c", "[[ $HPCACCEL_ATTEMPT == 1 ]] && sleep 60; echo done"]


@pytest.mark.chaos
@pytest.mark.parametrize("resilience", [{}, {"chain": 3, "chain_ahead": 1}], ids=["requeue", "chain"])
def test_dependent_run_waits_for_the_end_of_the_run_despite_a_requeue(
    scenario: Scenario, resilience: dict[str, Any]
) -> None:
    first = {"entrypoint": {"command": SLOW_ONCE}, "resilience": resilience}
    runs = submit_jobs(scenario, {"second": say("second", after=["first"]), "first": first})
    scenario.dir = runs["first"]
    scenario._wait(lambda: (runs["first"].attempt(1) / "step.json").exists(), "the first run's ranks")
    scenario.cli("stop", "--requeue", runs["first"].run_id)
    scenario.dir = runs["second"]
    assert scenario.wait_until_over() == 0, scenario.story
    assert len([one for one in times(runs["first"]) if one[0] == "start"]) == 2
    assert times(runs["second"])[0][1] >= times(runs["first"])[-1][1], "the second began before the first was over"


def test_afterany_afternotok_and_impossible_dependencies(scenario: Scenario) -> None:
    runs = submit_jobs(
        scenario,
        {
            "bad": {"entrypoint": {"command": ["false"]}, "resilience": {"restart_in_place": 0, "requeue": False}},
            "whatever": say("whatever", after=["afterany:bad"]),
            "sorry": say("sorry", after=["afternotok:bad", "whatever"]),
            "never": say("never", after=["bad"]),
        },
    )
    scenario.dir = runs["sorry"]
    assert scenario.wait_until_over() == 0, scenario.story
    assert not runs["never"].ledger.exists()
    # a run can depend on a pending run, but not on the success of a failed one
    answer = scenario.cli("submit", str(scenario.folder / "jobs.yaml"), "--after", "never", "--dry-run", check=False)
    assert answer.returncode == 0, answer.stderr
    scenario.cli("cancel", runs["never"].run_id)
    (scenario.folder / "late.yaml").write_text(yaml.safe_dump(say("late", name="late", after=["bad"])))
    refused = scenario.cli("submit", "late.yaml", check=False)
    assert refused.returncode == 2
    assert "would never start" in refused.stderr


LATER = "[[ $HPCACCEL_ATTEMPT == 1 ]] && exec sleep 120; "


@pytest.mark.chaos
@pytest.mark.parametrize("by_hand", [False, True], ids=["supervisor", "scontrol"])
def test_failure_after_a_preemption_is_a_failed_job_in_slurm(scenario: Scenario, by_hand: bool) -> None:
    """Newer releases keep the grace time across `scontrol requeue`, and start the job again at its next end."""
    runs = submit_jobs(
        scenario,
        {
            "bad": {
                "entrypoint": {"command": ["bash", "-c", LATER + "exit 7"]},
                "resilience": {"restart_in_place": 0, "max_failures": 1},
            },
            "sorry": say("sorry", after=["afternotok:bad"]),
            "glad": say("glad", after=["bad"]),
        },
    )
    scenario.dir = runs["bad"]
    job_id = preempt(scenario)
    if by_hand:
        assert scenario.cluster is not None
        scenario._wait(lambda: scenario.job(job_id)["PreemptTime"] != "None", "the grace time")
        scenario.cluster.run("scontrol", "requeue", job_id, check=False)  # the supervisor may have been faster
    scenario.dir = runs["sorry"]
    assert scenario.wait_until_over() == 0, scenario.story
    scenario.dir = runs["bad"]
    assert scenario.ends[-1] == ("failed", "end"), scenario.story
    assert len(scenario.lines("start")) == 2, scenario.story
    assert scenario.job(job_id)["JobState"] == "FAILED", scenario.story
    assert not runs["glad"].ledger.exists()
    scenario.cli("cancel", runs["glad"].run_id)


@pytest.mark.chaos
def test_pause_after_a_preemption_starts_no_dependent_run(scenario: Scenario) -> None:
    command = {"command": ["bash", "-c", LATER + "[[ $HPCACCEL_ATTEMPT == 2 ]] && exec sleep 120; echo done"]}
    runs = submit_jobs(scenario, {"first": {"entrypoint": command}, "second": say("second", after=["first"])})
    scenario.dir = runs["first"]
    job_id = preempt(scenario)
    scenario._wait(lambda: (runs["first"].attempt(2) / "step.json").exists(), "the ranks after the preemption")
    scenario.cli("stop", runs["first"].run_id)
    assert scenario.wait_until_over() == 85, scenario.story
    scenario._wait(lambda: scenario.job(job_id)["JobState"] == "FAILED", f"the end of job {job_id}")
    assert not runs["second"].ledger.exists()
    scenario.cli("resume", runs["first"].run_id)
    scenario.dir = runs["second"]
    assert scenario.wait_until_over() == 0, scenario.story


def preempt(scenario: Scenario) -> str:
    """Preempt the ranks of the scenario's run with grace time; return the run's job id."""
    assert scenario.cluster is not None
    scenario._wait(lambda: (scenario.dir.attempt(1) / "step.json").exists(), "the ranks")
    job_id: str = json.loads((scenario.dir.attempt(1) / "step.json").read_text())["job_id"]
    scenario.preempt()
    return job_id
