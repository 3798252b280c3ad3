"""A loop without an Accelerator, with a stop gate, on a real Slurm: Slurm signals the loader workers, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

PROGRAM = Path(__file__).parents[1] / "runtime" / "programs" / "gate.py"

pytestmark = pytest.mark.torch


@pytest.fixture
def scenario(cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path) -> Scenario:
    (tmp_path / "saved").mkdir()
    return Scenario(cluster, tmp_path, nodes=lease(2))


def submit(scenario: Scenario, *arguments: str, **slurm: object) -> None:
    words = ["--folder", str(scenario.folder / "saved"), "--workers", "1", *arguments]
    scenario.submit({"entrypoint": {"script": str(PROGRAM), "args": words}, "slurm": slurm})


def check_that_no_step_is_lost(scenario: Scenario, steps: int) -> None:
    """Each attempt begins where the one before it left, all ranks leave at one step, and no worker was killed."""
    ends = scenario.lines("end")
    assert [line["resumed_step"] for line in ends] == [0, *(line["last_step"] for line in ends[:-1])], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert ends[-1]["last_step"] == steps
    for line in ends:
        logs = [scenario.dir.rank_log(line["attempt"], rank).read_text() for rank in range(4)]
        last = {
            json.loads([text for text in log.splitlines() if text.startswith('{"step"')][-1])["step"] for log in logs
        }
        assert last == {line["last_step"]}, scenario.story
        assert not any("exited unexpectedly" in log for log in logs), scenario.story
    for line in ends[:-1]:
        assert line["checkpoint"] == str(scenario.folder / "saved" / f"{line['last_step']}.pt")
        assert line["checkpoint_step"] == line["last_step"]


@pytest.mark.chaos
@pytest.mark.parametrize("partition", ["gpu", "gpu0"])
def test_preempted_run_saves_and_continues_at_its_step(scenario: Scenario, partition: str) -> None:
    submit(scenario, "--pause", "0.2", "--steps", "100", partition=partition)
    scenario.wait_for_word("training")
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    check_that_no_step_is_lost(scenario, 100)


@pytest.mark.chaos
def test_five_jobs_of_a_minute_complete_the_training(scenario: Scenario) -> None:
    submit(scenario, "--pause", "0.5", "--steps", "300", time=1)
    assert scenario.wait_until_over(timeout_seconds=1200) == 0, scenario.story
    assert [reason for reason, _ in scenario.ends[:-1]] == ["time_limit"] * (len(scenario.ends) - 1), scenario.story
    assert scenario.ends[-1] == ("completed", "end"), scenario.story
    assert len(scenario.ends) >= 5, scenario.story
    check_that_no_step_is_lost(scenario, 300)
