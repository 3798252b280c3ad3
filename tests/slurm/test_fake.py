"""The double must have the real one's methods and behave alike where it matters."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm import JobState, Slurm
from hpcaccel.slurm.fake import FakeSlurm


def test_the_double_has_the_same_methods() -> None:
    methods = {name for name, value in vars(Slurm).items() if inspect.isfunction(value) and not name.startswith("_")}
    for name in methods:
        assert inspect.signature(getattr(FakeSlurm, name)) == inspect.signature(getattr(Slurm, name)), name


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --array=0-2\n")
    return path


def test_an_array_lives_task_by_task(script: Path) -> None:
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


def test_refusals_and_outages(script: Path) -> None:
    with pytest.raises(ClusterError, match="invalid account"):
        FakeSlurm(refuse="invalid account").sbatch(script)
    with pytest.raises(SlurmCommandError):
        FakeSlurm(unreachable="connect failure").queue()
    with pytest.raises(ClusterError):
        FakeSlurm(installed=False).version()
