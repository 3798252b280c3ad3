"""Tests of FakeSlurm: it has the methods of Slurm, and behaves like it where tests depend on it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm import JobState, Slurm
from tests.slurm.fake_slurm import FakeSlurm


def test_fake_slurm_has_the_methods_of_slurm() -> None:
    methods = {name for name, _ in inspect.getmembers(Slurm, inspect.isfunction) if not name.startswith("_")}
    assert {"sbatch", "queue", "partitions"} <= methods
    for name in methods:
        assert inspect.signature(getattr(FakeSlurm, name)) == inspect.signature(getattr(Slurm, name)), name


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --array=0-2\n")
    return path


def test_array_tasks_change_state_separately(script: Path) -> None:
    slurm = FakeSlurm()
    array = slurm.sbatch(script)
    tasks = [f"{array}_{index}" for index in range(3)]
    assert list(slurm.queue([array])) == tasks
    slurm.move(tasks[0], JobState.COMPLETED)
    assert list(slurm.queue([array])) == tasks[1:]
    slurm.move(tasks[1], JobState.RUNNING)
    assert slurm.requeue(tasks[1])
    assert not slurm.requeue(tasks[1])
    assert slurm.jobs[tasks[1]].restarts == 1
    slurm.move(tasks[1], JobState.RUNNING)
    slurm.cancel(array, only_pending=True)
    assert list(slurm.queue([array])) == [tasks[1]]
    slurm.cancel(array)
    assert {state.state for state in slurm.accounting([array]).values()} == {JobState.COMPLETED, JobState.CANCELLED}
    slurm.forget(tasks[0])
    assert slurm.job(tasks[0]) is None


def test_depend_applies_only_to_pending_jobs(script: Path) -> None:
    slurm = FakeSlurm()
    first, second = slurm.sbatch(script), slurm.sbatch(script)
    for index in range(3):
        slurm.move(f"{first}_{index}", JobState.RUNNING)
    slurm.depend(first, "afterok:1")
    slurm.depend(second, "afterok:1")
    assert slurm.dependencies == {second: "afterok:1"}


def test_jobs_are_found_by_script(script: Path) -> None:
    slurm = FakeSlurm()
    assert slurm.jobs_of_script(script) == []
    jobs = [slurm.sbatch(script), slurm.sbatch(script)]
    assert slurm.jobs_of_script(script) == jobs
    assert slurm.jobs_of_script(script.with_name("other.sbatch")) == []


def test_fake_slurm_raises_on_refusal_outage_and_missing_slurm(script: Path) -> None:
    with pytest.raises(ClusterError, match="invalid account"):
        FakeSlurm(refuse="invalid account").sbatch(script)
    with pytest.raises(SlurmCommandError):
        FakeSlurm(unreachable="connect failure").queue()
    with pytest.raises(ClusterError):
        FakeSlurm(installed=False).version()
