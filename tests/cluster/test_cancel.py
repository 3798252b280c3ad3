"""Cancelled runs stay cancelled, at any moment, with scancel and with ``hpcaccel cancel``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario, settled

Lease = Callable[[int], list[str]]

ONE = {"nodes": 1, "gpus_per_node": 1}
COMES_BACK_SECONDS = 12
"""The development cluster starts a requeued job after 5 seconds or a little more."""


def waits_in_the_queue(run: Scenario) -> None:
    run.plain("--wait", slurm={"begin": "now+1hour"})


def starts(run: Scenario) -> None:
    run.train("--start-pause", "30", slurm=ONE)
    run.wait_for_word("starting")


def trains(run: Scenario) -> None:
    run.train("--pause", "1", slurm=ONE)
    run.wait_for_step(2)


def saves(run: Scenario) -> None:
    run.train("--pause", "0.1", "--save-pause", "4", slurm=ONE, checkpoint={"every_steps": 3})
    run.wait_for_word("saving")


def is_in_its_grace_time(run: Scenario) -> None:
    run.train("--pause", "0.5", "--save-pause", "8", slurm=ONE)
    run.wait_for_step(2)
    run.preempt()
    run.wait_for_word("saving")


def waits_to_start_again(run: Scenario) -> None:
    run.plain("--wait", "--once", runtime={"stop": "signals"})
    run.wait_for_word("starting")
    run.cli("stop", "--requeue", run.dir.run_id)
    run.wait_for_ends(1)
    assert run.cluster is not None
    run.cluster.wait_for(run.job_id, ["PENDING"])


USUAL = {
    (waits_in_the_queue, "hpcaccel"),
    (trains, "scancel"),
    (waits_to_start_again, "hpcaccel"),
}
MOMENTS = [waits_in_the_queue, starts, trains, saves, is_in_its_grace_time, waits_to_start_again]


@pytest.mark.parametrize(
    ("when", "how"),
    [
        pytest.param(when, how, marks=[] if (when, how) in USUAL else pytest.mark.chaos)
        for when in MOMENTS
        for how in ("scancel", "hpcaccel")
    ],
)
def test_cancelled_run_does_not_start_again(
    cluster: Cluster, lease: Lease, tmp_path: Path, when: Callable[[Scenario], None], how: str
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    when(run)
    attempts = len(run.lines("start"))
    if how == "scancel":
        run.scancel()
    else:
        run.cli("cancel", run.dir.run_id)
    cluster.wait_for(run.job_id, ["CANCELLED"])
    settled(COMES_BACK_SECONDS)
    assert cluster.job(run.job_id)["JobState"] == "CANCELLED", run.story
    assert len(run.lines("start")) == attempts, run.story
    assert run.status()["state"] == "cancelled", run.story
    assert run.wait_until_over() == 130


@pytest.mark.parametrize("how", ["hpcaccel", pytest.param("scancel", marks=pytest.mark.chaos)])
def test_cancelled_run_whose_ranks_hang_ends(cluster: Cluster, lease: Lease, tmp_path: Path, how: str) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    run.plain("--wait", runtime={"stop": "cooperative"})  # so that it does not notice SIGTERM
    run.wait_for_word("starting")
    if how == "scancel":
        run.scancel()
    else:
        run.cli("cancel", run.dir.run_id)
    cluster.wait_for(run.job_id, ["CANCELLED"])
    assert run.wait_until_over() == 130
    assert run.ends == [("cancelled", "end")], run.story


@pytest.mark.chaos
def test_preempted_array_task_is_requeued_alone(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    run = Scenario(cluster, tmp_path, nodes=[])
    nodes = lease(3)
    run.plain(
        "--wait", "--until", "1", "--seed", "0",
        grid=("--grid", "seed=1,2,3"),
        runtime={"stop": "signals"},
        slurm={"nodelist": None, "exclude": ",".join(sorted(set(cluster.nodes) - set(nodes))), "gpus_per_node": 2},
    )  # fmt: skip
    tasks = [run.dir.task(index) for index in range(3)]
    for task in tasks:
        run.wait_for_word("starting", dir=task)
    victim = run.lines("start", dir=tasks[1])[0]["nodes"]
    run.preempt(victim)
    run.wait_for_ends(2, dir=tasks[1])
    ends = [(line["reason"], line["decision"]) for line in run.lines("end", dir=tasks[1])]
    assert ends == [("preempted", "requeue"), ("completed", "end")]
    for index in (0, 2):
        assert len(run.lines("start", dir=tasks[index])) == 1
        assert run.lines("end", dir=tasks[index]) == []
        assert cluster.job(f"{run.job_id}_{index}")["Restarts"] == "0"
    run.cli("cancel", run.dir.run_id)
    wait_until(lambda: run.status()["state"] == "cancelled", "the array is cancelled")
