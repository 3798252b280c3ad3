"""The state of a run, from its directory and from Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision, Reason, to_dict
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.slurm.queue_cache import Queue
from hpcaccel.slurm.queue_cache_files import shared_files
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray, statuses
from hpcaccel.submission.jobs.run_state import read_facts
from hpcaccel.submission.runs.status import RunStatus, array_status
from tests.submission.conftest import Project


@pytest.fixture
def run(project: Project) -> Run:
    run = project.queue()
    assert isinstance(run, Run)
    return run


def started(run: Run, attempt: int = 1) -> None:
    append_line(run.dir.ledger, to_dict(AttemptStart(attempt=attempt, time=1.0, job_id=run.job_id)))
    run.dir.attempt(attempt).mkdir()


def ended(run: Run, reason: Reason, decision: Decision, attempt: int = 1) -> None:
    line = AttemptEnd(attempt=attempt, time=2.0, reason=reason, decision=decision, detail="so it was")
    append_line(run.dir.ledger, to_dict(line))


def asked(run: Run, then: str) -> None:
    request = StopRequest(reason="stop", then=then, time=time.time())  # type: ignore[arg-type]
    write_json(run.dir.control / "stop-1.json", to_dict(request))


def move(project: Project, run: Run, state: JobState | None, **changes: object) -> None:
    if state is None:
        project.slurm.forget(run.job_id)
    else:
        project.slurm.move(run.job_id, state, **changes)


@pytest.mark.parametrize(
    ("reason", "decision", "state", "exit_code"),
    [
        ("completed", "end", "completed", 0),
        ("failed", "end", "failed", 1),
        ("time_limit", "end", "failed", 1),
        ("cancelled", "end", "cancelled", 130),
        ("lost", "end", "lost", 1),
        ("stop", "pause", "paused", 85),
        ("preempted", "pause", "paused", 85),
    ],
)
def test_final_ledger_entry_gives_the_state_without_slurm(
    project: Project, run: Run, reason: Reason, decision: Decision, state: str, exit_code: int
) -> None:
    started(run)
    ended(run, reason, decision)
    project.slurm.calls.clear()
    now = run.status()
    assert (now.state, now.reason, now.detail, now.exit_code) == (state, reason, "so it was", exit_code)
    assert now.ended
    assert project.slurm.calls == []


@pytest.mark.parametrize(
    ("history", "says", "state"),
    [
        ([], JobState.PENDING, "pending"),
        ([], JobState.CONFIGURING, "starting"),
        ([], JobState.RUNNING, "starting"),
        (["start"], JobState.RUNNING, "running"),
        (["start"], JobState.SUSPENDED, "running"),
        (["start"], JobState.COMPLETING, "stopping"),
        (["start", "requeue"], JobState.PENDING, "requeued"),
        (["start", "requeue"], JobState.RUNNING, "starting"),
        (["start", "restart"], JobState.RUNNING, "starting"),
        (["start"], JobState.PENDING, "requeued"),  # a node failed, and Slurm requeued the job
        (["start"], JobState.NODE_FAIL, "lost"),
        (["start"], JobState.COMPLETED, "lost"),
        (["start"], JobState.CANCELLED, "cancelled"),
        (["start"], None, "lost"),
        (["start", "requeue"], JobState.CANCELLED, "cancelled"),
        ([], JobState.CANCELLED, "cancelled"),
        ([], JobState.FAILED, "failed"),
        ([], None, "lost"),
    ],
)
def test_state_without_a_final_ledger_entry_comes_from_slurm(
    project: Project, run: Run, history: list[str], says: JobState | None, state: str
) -> None:
    for word in history:
        if word == "start":
            started(run)
        else:
            ended(run, "preempted", word)  # type: ignore[arg-type]
    move(project, run, says)
    assert run.status().state == state


@pytest.mark.parametrize("says", [JobState.CANCELLED, JobState.FAILED, None])
def test_ended_job_with_a_cancel_request_is_cancelled(project: Project, run: Run, says: JobState | None) -> None:
    started(run)
    asked(run, "cancel")
    move(project, run, says)
    assert run.status().state == "cancelled"


def test_cancelled_job_with_a_pause_request_is_paused(project: Project, run: Run) -> None:
    asked(run, "pause")
    move(project, run, JobState.CANCELLED)
    assert run.status().state == "paused"


def test_run_with_an_open_stop_request_is_stopping(project: Project, run: Run) -> None:
    started(run)
    move(project, run, JobState.RUNNING)
    asked(run, "pause")
    assert run.status().state == "stopping"


def test_run_with_a_stop_file_for_its_ranks_is_stopping(project: Project, run: Run) -> None:
    started(run)
    move(project, run, JobState.RUNNING)
    write_json(run.dir.stop(1), to_dict(StopRequest(reason="preempted", then="requeue", time=0)))
    assert run.status().state == "stopping"


def test_job_missing_from_squeue_is_looked_up_in_sacct(project: Project, run: Run) -> None:
    started(run)
    move(project, run, JobState.NODE_FAIL)
    project.slurm.calls.clear()
    now = run.status()
    assert "NODE_FAIL" in now.detail
    project.slurm.forget(run.job_id)
    project.slurm.calls.clear()
    assert run.status().state == "lost"
    assert project.slurm.calls == ["queue", "accounting", "job", "config"]


@pytest.mark.parametrize(("history", "state"), [([], "pending"), (["start"], "running")])
def test_unreachable_controller_makes_no_run_lost(project: Project, run: Run, history: list[str], state: str) -> None:
    for _ in history:
        started(run)
    project.slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    now = run.status()
    assert (now.state, now.ended) == (state, False)
    assert "Slurm does not respond" in now.detail


def test_job_unlisted_within_min_job_age_is_not_lost(project: Project, run: Run) -> None:
    started(run)
    project.slurm.settings["MinJobAge"] = "300 sec"
    project.slurm.forget(run.job_id)
    now = run.status()
    assert (now.state, now.ended) == ("running", False)
    assert "Slurm no longer lists the job, although it did recently" in now.detail


def test_ledger_entry_newer_than_the_cached_queue_gives_the_state(project: Project, run: Run) -> None:
    asking = Queue(project.slurm, seconds=60.0, files=shared_files())
    statuses([run.dir], queue=asking)
    line = AttemptStart(attempt=1, time=time.time(), job_id=run.job_id)
    append_line(run.dir.ledger, to_dict(line))
    run.dir.attempt(1).mkdir()
    project.slurm.calls.clear()
    (now,) = statuses([run.dir], queue=asking)
    assert (now.state, project.slurm.calls) == ("running", [])
    later = AttemptEnd(attempt=1, time=time.time(), reason="preempted", decision="requeue")
    append_line(run.dir.ledger, to_dict(later))
    assert statuses([run.dir], queue=asking)[0].state == "requeued"


def test_outage_shows_the_last_known_state_and_its_time(project: Project, run: Run) -> None:
    asking = Queue(project.slurm, seconds=0.0, files=shared_files())
    project.slurm.move(run.job_id, JobState.PENDING, reason="Priority")
    (before,) = statuses([run.dir], queue=asking)
    assert (before.note, before.asked is not None) == ("", True)
    project.slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    (now,) = statuses([run.dir], queue=asking)
    assert (now.state, now.reason, now.asked) == ("pending", "Priority", before.asked)
    assert "Slurm does not respond" in now.note
    assert now.detail.startswith("Priority: jobs with a higher priority are ahead of it (as of ")


def test_pending_reason_is_explained(project: Project, run: Run) -> None:
    move(project, run, JobState.PENDING, reason="QOSMaxJobsPerUserLimit")
    assert run.status().detail == ("QOSMaxJobsPerUserLimit: the QOS limit for running jobs per user is reached")
    move(project, run, JobState.PENDING, reason="Priority")
    assert run.status().detail == "Priority: jobs with a higher priority are ahead of it"


def test_run_that_ends_during_the_query_is_completed(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(run)
    move(project, run, JobState.COMPLETED)
    asking = project.slurm.queue

    def queue(*args: object, **options: object) -> object:
        ended(run, "completed", "end")
        return asking(*args, **options)

    monkeypatch.setattr(project.slurm, "queue", queue)
    assert run.status().state == "completed"


def test_attempt_of_an_earlier_job_does_not_affect_the_new_job(project: Project, run: Run) -> None:
    started(run)
    ended(run, "stop", "pause")
    run.resume()
    now = run.status()
    assert (now.state, now.job_id, now.attempts) == ("requeued", "101", 1)


def test_many_runs_share_one_queue_query(project: Project) -> None:
    runs = [project.queue() for _ in range(5)]
    for run in runs[:2]:
        project.slurm.forget(run.job_id)
    project.slurm.calls.clear()
    found = statuses([run.dir for run in runs], project.slurm)
    assert [one.state for one in found] == ["lost", "lost", "pending", "pending", "pending"]
    assert project.slurm.calls == ["queue", "accounting", "job", "config", "job"]


LOOKER = """\
import sys
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.status import status
print("ready", flush=True)
sys.stdin.readline()
now = status(RunDir(sys.argv[1]))
print(now.state, now.note)
"""
LINE = "{job}|RUNNING|gpu|ann|n1|1|N/A|N/A|N/A|5:00|None|x"


def test_twenty_processes_share_one_squeue(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [project.queue() for _ in range(3)]
    programs = tmp_path / "bin"
    programs.mkdir()
    lines = "\n".join(LINE.format(job=run.job_id) for run in runs)
    for name in ("squeue", "sacct", "scontrol"):
        text = f"#!/bin/sh\necho {name} >> {tmp_path}/asked\nsleep 0.5\ncat <<'END'\n{lines}\nEND\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-S", "-c", LOOKER]
    lookers = [subprocess.Popen([*command, str(runs[number % 3].path)], **pipes) for number in range(20)]
    for looker in lookers:
        assert looker.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    for looker in lookers:
        looker.stdin.write("\n")  # type: ignore[union-attr]
        looker.stdin.flush()  # type: ignore[union-attr]
    assert {looker.communicate(timeout=300)[0].strip() for looker in lookers} == {"starting"}
    assert (tmp_path / "asked").read_text().split() == ["squeue"]


def test_array_state_summarizes_its_tasks(project: Project) -> None:
    array = project.queue(grid=["args.lr=1,2,3"])
    assert isinstance(array, RunArray)

    def now() -> RunStatus:
        return array.status()

    assert (now().state, len(now().tasks)) == ("pending", 3)
    project.slurm.move("100_1", JobState.RUNNING)
    started(array[1])
    assert now().state == "running"
    for index, reason in enumerate(("completed", "failed", "completed")):
        ended(array[index], reason, "end")  # type: ignore[arg-type]
    assert (now().state, now().detail) == ("failed", "1 failed, 2 completed")
    assert [task.job_id for task in now().tasks] == ["100_0", "100_1", "100_2"]


def test_status_has_slurms_estimate_and_the_end_of_the_time_limit(project: Project, run: Run) -> None:
    move(project, run, JobState.PENDING, reason="Resources", start_time=5000.0, partition="gpu")
    now = run.status()
    assert (now.state, now.estimated_start, now.deadline, now.partition) == ("pending", 5000.0, None, "gpu")
    started(run)
    move(project, run, JobState.RUNNING, start_time=100.0, end_time=3700.0, time_limit_seconds=3600, partition="gpu")
    now = run.status()
    assert (now.state, now.estimated_start, now.deadline, now.partition) == ("running", None, 3700.0, "gpu")
    move(project, run, JobState.RUNNING, end_time=3700.0, time_limit_seconds=None)
    assert run.status().deadline is None
    ended(run, "completed", "end")
    assert (run.status().deadline, run.status().estimated_start) == (None, None)


def test_array_starts_when_its_first_task_does(run: Run) -> None:
    facts = read_facts(run.dir)
    tasks = [
        RunStatus(run_id=f"x_{index}", name="x", state="pending", estimated_start=start, partition="gpu")
        for index, start in enumerate((None, 5000.0, 4000.0))
    ]
    now = array_status(facts, tasks)
    assert (now.estimated_start, now.partition) == (4000.0, "gpu")
