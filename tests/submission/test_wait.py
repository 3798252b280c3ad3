"""Waiting for a run: few Slurm queries, late ledger entries and outages."""

from __future__ import annotations

import threading

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, AttemptStart, to_dict
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run
from tests.submission.conftest import Project


@pytest.fixture
def run(project: Project, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("hpcaccel.submission.runs.base_handle.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("hpcaccel.submission.runs.base_handle.CONFIRM_SECONDS", 0.3)
    run = project.queue()
    assert isinstance(run, Run)
    append_line(run.dir.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id=run.job_id)))
    project.slurm.move(run.job_id, JobState.RUNNING)
    return run


def complete(run: Run) -> None:
    append_line(run.dir.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, reason="completed", decision="end")))


def test_wait_reads_the_run_directory_and_queries_slurm_once(project: Project, run: Run) -> None:
    project.slurm.calls.clear()
    threading.Timer(0.5, complete, [run]).start()
    assert run.wait(30).state == "completed"
    assert project.slurm.calls == ["queue"]


def test_wait_returns_completed_if_the_final_ledger_entry_is_late(project: Project, run: Run) -> None:
    project.slurm.forget(run.job_id)
    threading.Timer(0.1, complete, [run]).start()
    assert run.wait(30).state == "completed"


def test_wait_returns_lost_if_no_ledger_entry_follows(project: Project, run: Run) -> None:
    project.slurm.forget(run.job_id)
    assert run.wait(30).state == "lost"


def test_slurm_outage_does_not_end_a_wait(project: Project, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.submission.runs.base_handle.QUERY_SECONDS", {"slurm": 0.05})
    project.slurm.unreachable = "Unable to contact slurm controller"
    with pytest.raises(TimeoutError):
        run.wait(0.3)
    project.slurm.unreachable = ""
    project.slurm.move(run.job_id, JobState.CANCELLED)
    assert run.wait(30).state == "cancelled"


def test_wait_returns_for_a_paused_run(run: Run) -> None:
    append_line(run.dir.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, reason="stop", decision="pause")))
    assert run.wait(30).state == "paused"
