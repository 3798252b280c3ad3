"""Tests of SlurmAllocation: the status of a job, and when the job can be requeued."""

from __future__ import annotations

import time

import pytest

from hpcaccel.node.allocation import TAKEN_DOWN
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation
from hpcaccel.slurm.states import JobInfo, JobState
from tests.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def slurm() -> FakeSlurm:
    slurm = FakeSlurm()
    slurm.jobs["45"] = JobInfo(
        job_id="45", state=JobState.RUNNING, nodes="n1", start_time=1000.0, end_time=1060.0, time_limit_seconds=60
    )
    return slurm


@pytest.fixture
def allocation(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SlurmAllocation:
    monkeypatch.setenv("SLURM_JOB_ID", "45")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return SlurmAllocation(slurm)  # type: ignore[arg-type]


@pytest.mark.parametrize(("preempt_time", "preempted"), [(None, False), (1030.0, True), (1000.0, True), (990.0, False)])
def test_preempt_time_before_the_start_is_ignored(
    slurm: FakeSlurm, allocation: SlurmAllocation, preempt_time: float | None, preempted: bool
) -> None:
    slurm.move("45", JobState.RUNNING, preempt_time=preempt_time)
    assert allocation.status().preempted is preempted


def test_completing_job_at_its_time_limit_is_requeued(slurm: FakeSlurm, allocation: SlurmAllocation) -> None:
    slurm.move("45", JobState.COMPLETING, reason="TimeLimit")
    status = allocation.status()
    assert (status.termination_reason, status.requeueable, status.running) == ("time_limit", True, False)
    allocation.requeue()
    assert slurm.requeued == ["45"]


@pytest.mark.parametrize("end_time", [1030.0, 1060.0])
def test_cancelled_job_is_not_requeued(slurm: FakeSlurm, allocation: SlurmAllocation, end_time: float) -> None:
    slurm.move("45", JobState.COMPLETING, end_time=end_time)  # even at its limit, as with OverTimeLimit
    assert not allocation.status().requeueable
    assert allocation.requeue() == TAKEN_DOWN
    assert not slurm.requeued
