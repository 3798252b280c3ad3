"""Programs with their own checkpoints that save on SIGTERM and exit with 0: they do not count as completed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .dev_cluster import Cluster, wait_until
from .scenario import PROGRAMS, Scenario

Lease = Callable[[int], list[str]]

STEPS = 24


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


def entrypoint(how: str, *, seconds: float) -> dict[str, Any]:
    words = [str(STEPS), str(seconds)]
    if how == "trap":
        return {"command": [str(PROGRAMS / "own.sh")], "args": words}
    return {"script": str(PROGRAMS / "own.py"), "args": [how, *words]}


def submit(scenario: Scenario, how: str, *, seconds: float = 0.25, **sections: Any) -> None:
    slurm = {"nodes": 1, "gpus_per_node": 1, **sections.pop("slurm", {})}
    wishes = {"runtime": {"stop": "signals"}, "slurm": slurm, **sections}
    scenario.submit({"entrypoint": entrypoint(how, seconds=seconds), **wishes})


def said(scenario: Scenario) -> list[str]:
    """First and last step of each attempt, as printed."""
    logs = [scenario.dir.rank_log(line["attempt"], 0).read_text().splitlines() for line in scenario.lines("start")]
    return [line for log in logs for line in log if line.startswith(("from", "left at"))]


chaos = pytest.mark.chaos


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["raise", "flag", "trap"])
def test_program_continues_its_own_checkpoint_after_a_preemption(scenario: Scenario, how: str) -> None:
    submit(scenario, how)
    scenario.wait_for_word("from")
    wait_until(scenario.dir.foreign_metrics(1).exists, "the first step")
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    first, left, second, last = said(scenario)
    assert (first, last) == ("from 0", f"left at {STEPS}")
    assert left.removeprefix("left at ") == second.removeprefix("from ") != "0"


@chaos
def test_loader_workers_survive_the_signal_of_a_preemption(scenario: Scenario) -> None:
    scenario.submit({"entrypoint": {"script": str(PROGRAMS / "loading.py")}, "slurm": {"nodes": 1, "gpus_per_node": 1}})
    scenario.wait_for_word("loading")
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    scenario.wait_for_word("saved after 20 more batches")


@chaos
@pytest.mark.parametrize("how", ["raise", "flag", "trap"])
def test_time_limit_signalled_only_by_slurm_is_recognized(scenario: Scenario, how: str) -> None:
    # Slurm's only warning is lost in the set-up, and its SIGTERM comes while the supervisor is stopped.
    lost = "warned=; trap warned=1 USR2; [ ${SLURM_RESTART_COUNT:-0} -gt 0 ] || until [ $warned ]; do sleep 0.2; done"
    environment = {"python": sys.executable, "setup": [lost]}
    submit(scenario, how, seconds=5, environment=environment, slurm={"time": 1}, resilience={"warning_seconds": 1})
    scenario.wait_for_word("from")
    os.kill(json.loads(scenario.dir.lease.read_text())["pid"], signal.SIGSTOP)
    scenario.wait_for_word("from", attempt=2)
    scenario.cli("cancel", scenario.dir.run_id)
    assert scenario.wait_until_over() == 130, scenario.story
    assert scenario.ends[0] == ("time_limit", "requeue"), scenario.story
    first, left, second = said(scenario)[:3]
    assert first == "from 0"
    assert left.removeprefix("left at ") == second.removeprefix("from ") != "0"


@chaos
def test_five_slices_of_a_minute_complete_a_program_with_checkpoints_of_its_own(scenario: Scenario) -> None:
    """Each slice is ended by its time limit. Watched checkpoints count as progress, so the caps do not end the run."""
    steps = 1500
    scenario.submit(
        {
            "entrypoint": {
                "script": str(PROGRAMS / "saves_by_itself.py"),
                "args": ["{run_dir}/out", str(steps), "0.2"],
                "resume_args": ["--resume", "{newest}"],
            },
            "checkpoint": {"watch": {"glob": "{run_dir}/out/step-*", "complete": "done"}},
            "slurm": {"nodes": 1, "gpus_per_node": 1, "time": 1},
            "resilience": {"warning_seconds": 5},
        }
    )
    scenario.wait_for_ends(5)
    assert scenario.wait_until_over() == 0, scenario.story
    ends = scenario.lines("end")
    assert len(ends) >= 5, scenario.story
    assert scenario.ends == [("time_limit", "requeue")] * (len(ends) - 1) + [("completed", "end")], scenario.story
    saved = [line["checkpoint_step"] for line in ends[:-1]]
    assert saved == sorted(set(saved)), "each slice got further"
    starts = [scenario.wait_for_word("from", attempt=line["attempt"]) for line in scenario.lines("start")]
    assert starts == ["from 0", *(f"from {step}" for step in saved)]
    assert scenario.wait_for_word("trained", attempt=len(ends)) == f"trained to {steps}"
