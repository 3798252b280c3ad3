"""Slow saves: started early enough before the time limit, and not started if they cannot finish in time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    scenario = Scenario(cluster, tmp_path, nodes=lease(1))
    return scenario


def train(scenario: Scenario, *, save_seconds: int, **sections: object) -> None:
    slurm = {"nodes": 1, **sections.pop("slurm", {})}  # type: ignore[dict-item]
    arguments = ("--epochs", "4", "--pause", "2", "--save-pause", str(save_seconds))
    scenario.train(*arguments, slurm=slurm, checkpoint={"every_steps": 10}, **sections)


@pytest.mark.chaos
def test_run_stops_early_enough_before_the_limit_for_a_slow_save(cluster: Cluster, scenario: Scenario) -> None:
    train(scenario, save_seconds=12, slurm={"time": 2}, resilience={"warning_seconds": 5})
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("time_limit", "requeue"), ("completed", "end")], scenario.story
    first = scenario.lines("end")[0]
    assert first["checkpoint_step"] == first["last_step"] > 10, scenario.story
    assert "two steps and a save may take" in scenario.dir.supervisor_log(1).read_text()
    told = json.loads(scenario.cli("report", scenario.dir.run_id, "--json").stdout)
    assert sum(told["seconds"].values()) == pytest.approx(told["total_seconds"])
    assert told["seconds"]["queue"] == pytest.approx(_waited(cluster, scenario), abs=2), scenario.story
    assert told["steps_lost"] == 0


def _waited(cluster: Cluster, scenario: Scenario) -> float:
    """Seconds that the run was without nodes, from Slurm's accounting (whole seconds) and its attempts' ends."""
    command = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=Start"]
    answer = cluster.run("env", "SLURM_TIME_FORMAT=%s", *command, f"--jobs={scenario.job_id}")
    starts = sorted(map(float, answer.stdout.split()))
    left = [json.loads(scenario.dir.record.read_text())["created"], *(end["time"] for end in scenario.lines("end"))]
    return sum(start - end for start, end in zip(starts, left, strict=False))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("partition", "save_seconds"), [pytest.param("gpu", 25, id="grace"), pytest.param("gpu0", 12, id="KillWait")]
)
def test_save_that_cannot_finish_in_time_is_not_started(scenario: Scenario, partition: str, save_seconds: int) -> None:
    train(scenario, save_seconds=save_seconds, slurm={"partition": partition})
    scenario.wait_for_step(15)
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    said = scenario.dir.rank_log(1, 0).read_text()
    found = re.search(
        r"stopping at step (\d+) \(preempted\): no time to save, which takes about \d+ s\. Steps 11 to (\d+) are lost",
        said,
    )
    assert found, scenario.story
    assert found[1] == found[2]
    assert scenario.status()["steps_lost"] == int(found[1]) - 10
