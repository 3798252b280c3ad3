"""Tests of the lease of a run directory: which job is refused, and which takes it over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunBusy
from hpcaccel.node import lease
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo, JobState


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def queue_is(monkeypatch: pytest.MonkeyPatch, *waiting: str) -> None:
    job = JobInfo(job_id="0", state=JobState.PENDING)
    monkeypatch.setattr(Slurm, "queue", lambda self, wanted: {one: job for one in wanted if one in waiting})
    monkeypatch.setattr(Slurm, "job", lambda self, job_id: None)
    monkeypatch.setattr(lease, "NAMED_WITHIN_SECONDS", 0.0)


def test_foreign_job_is_refused_while_the_runs_own_job_is_pending(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    queue_is(monkeypatch, "2")
    write_json(run.record, {"job_ids": ["1", "2"]})
    with pytest.raises(RunBusy, match="continues in job 2, and job 7 does not belong to it"):
        lease.acquire(run, job_id="7", restart_count=0)
    assert not run.lease.exists()
    lease.acquire(run, job_id="2", restart_count=0)


def test_foreign_job_gets_the_lease_after_the_runs_own_job_has_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_is(monkeypatch)
    write_json(run.record, {"job_ids": ["2"]})
    lease.acquire(run, job_id="7", restart_count=0)
    value = read_json(run.lease)
    assert value is not None
    assert value["job_id"] == "7"


def test_release_keeps_a_lease_that_another_host_has_taken_over(run: RunDir) -> None:
    lease.acquire(run, job_id="2", restart_count=0)
    lease.release(run)
    assert not run.lease.exists()
    lease.acquire(run, job_id="2", restart_count=0)
    value = read_json(run.lease)
    assert value is not None
    assert value["pid_start"] == process_start(os.getpid())
    write_json(run.lease, {**value, "host": "elsewhere"})
    lease.release(run)
    assert run.lease.exists()


@pytest.mark.parametrize(
    ("state", "refused"), [(JobState.RUNNING, True), (JobState.COMPLETED, False), (None, False)], ids=str
)
def test_lease_holder_missing_from_the_queue_is_looked_up(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, state: JobState | None, refused: bool
) -> None:
    queue_is(monkeypatch)
    job = None if state is None else JobInfo(job_id="2", state=state)
    monkeypatch.setattr(Slurm, "job", lambda self, job_id: job)
    lease.acquire(run, job_id="2", restart_count=0)
    value = read_json(run.lease)
    assert value is not None
    write_json(run.lease, {**value, "host": "elsewhere"})
    if refused:
        with pytest.raises(RunBusy, match="is in use by job 2 on elsewhere"):
            lease.acquire(run, job_id="7", restart_count=0)
    else:
        lease.acquire(run, job_id="7", restart_count=0)
