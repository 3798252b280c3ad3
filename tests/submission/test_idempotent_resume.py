"""Resume repeated after a killed resume: one new job in all."""

from __future__ import annotations

import contextvars
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core import progress_notes
from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, to_dict
from hpcaccel.errors import RunBusy, SlurmCommandError, UserError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray
from hpcaccel.submission.entrypoint import entry
from hpcaccel.submission.jobs import critical_section, job_submission, recovery, run_state
from hpcaccel.submission.runs.run_handle import open_run
from tests.submission.conftest import Project

Killed = Callable[..., None]


@pytest.fixture
def run(project: Project) -> Run:
    run = project.queue()
    assert isinstance(run, Run)
    run.stop()
    return run


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Killed:
    """Resume like a process killed after sbatch or, if ``recorded``, after it wrote the record."""

    def resume(run: Run | RunArray, *, recorded: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(job_submission.JobSubmission, "clear_intent", lambda turn: None)
            if not recorded:
                patch.setattr(run_state, "write_record", lambda *args, **more: None)
            run.resume()

    return resume


@pytest.mark.parametrize("recorded", [False, True])
def test_second_resume_adopts_the_job_of_a_killed_one(
    project: Project, run: Run, killed: Killed, recorded: bool
) -> None:
    killed(run, recorded=recorded)
    run.resume()
    assert run.record.job_ids == ["100", "101"]
    assert len(project.slurm.submissions) == 2
    assert run.status().state == "pending"
    with pytest.raises(RunBusy):
        run.resume()


def test_killed_resume_is_recovered_through_a_symlinked_path(project: Project, run: Run, killed: Killed) -> None:
    killed(run, recorded=False)
    (project.path / "link").symlink_to(project.runs)
    other = open_run(project.path / "link" / run.path.relative_to(project.runs), slurm=project.slurm)
    with job_submission.JobSubmission(run.dir), pytest.raises(job_submission.SubmitUnderway):
        job_submission.JobSubmission(other.dir, wait=False).__enter__()
    assert other.status().state == "pending"
    assert run.record.job_ids == ["100", "101"]


@pytest.mark.parametrize("recorded", [False, True])
def test_second_resume_of_an_array_adopts_its_job(project: Project, killed: Killed, recorded: bool) -> None:
    array = project.queue(grid=["args.lr=1,2,3"])
    assert isinstance(array, RunArray)
    end = AttemptEnd(attempt=1, time=2.0, reason="failed", decision="end")
    for index in (1, 2):
        append_line(array[index].dir.ledger, to_dict(end))
    append_line(array[0].dir.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, reason="completed", decision="end")))
    killed(array, recorded=recorded)
    array.resume()
    assert [run.record.job_ids for run in array] == [["100_0"], ["100_1", "101_1"], ["100_2", "101_2"]]
    assert len(project.slurm.submissions) == 2


def test_ended_job_of_a_killed_resume_is_followed_by_a_new_job(project: Project, run: Run, killed: Killed) -> None:
    killed(run, recorded=False)
    project.slurm.move("101", JobState.FAILED)
    append_line(run.dir.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, reason="failed", decision="end")))
    run.resume()
    assert run.record.job_ids == ["100", "101", "102"]


def test_resume_killed_before_sbatch_is_submitted_again(project: Project, run: Run) -> None:
    os.utime(run.dir.script, (1.0, 1.0))
    long_ago = job_submission.JobSubmission(run.dir, slurm=project.slurm, now=lambda: 1.0)
    long_ago.write_intent()
    run.resume()
    assert run.record.job_ids == ["100", "101"]
    assert not run.dir.resuming.exists()


def test_settling_time_is_counted_from_the_end_of_the_copy(project: Project, run: Run) -> None:
    """The intent is older than the script, which was written just before sbatch."""
    job_submission.JobSubmission(run.dir, slurm=project.slurm, now=lambda: 1000.0).write_intent()
    os.utime(run.dir.script, (1090.0, 1090.0))
    for at, is_underway in ((1100.0, True), (1106.0, False)):
        with job_submission.JobSubmission(run.dir, slurm=project.slurm, wait=False, now=partial(float, at)) as turn:
            earlier = turn.interrupted()
            assert earlier is not None
            with pytest.raises(job_submission.SubmitUnderway) if is_underway else nullcontext():
                assert recovery.arrived_jobs(turn, earlier) == []


def test_killed_resume_is_recovered_without_file_locks(
    project: Project, run: Run, killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    told = []
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(progress_notes, "_SHOWN", set())
    token = progress_notes.SHOW_NOTE.set(told.append)
    try:
        killed(run, recorded=False)
        run.resume()
        assert project.queue().job_id == "102"
    finally:
        progress_notes.SHOW_NOTE.reset(token)
    assert run.record.job_ids == ["100", "101"]
    assert len(told) == 1
    assert "cannot be used (its file system does not support locks)" in told[0]


def test_unusable_state_directory_shows_one_note(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(project.path / "job.yaml"))
    monkeypatch.setattr(progress_notes, "_SHOWN", set())
    message = r"cannot be used \(Not a directory\): the command continues without it"
    with pytest.warns(UserWarning, match=message) as told:
        run = project.queue()
    assert len(told) == 1
    assert run.status().state == "pending"


def test_waiting_for_a_lock_shows_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    token = progress_notes.SHOW_NOTE.set(lambda sentence: told.set())
    monkeypatch.setattr(progress_notes, "SILENT_SECONDS", 0.05)
    mine = critical_section.take(tmp_path / "lock", what="is first")
    other = threading.Thread(
        target=contextvars.copy_context().run,
        args=(critical_section.take, tmp_path / "lock"),
        kwargs={"what": "is first"},
    )
    other.start()
    try:
        assert told.wait(20)
    finally:
        critical_section.give_back(tmp_path / "lock", mine)
        other.join()
        progress_notes.SHOW_NOTE.reset(token)


def test_second_resume_adopts_the_job_after_an_sbatch_timeout(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = project.slurm.sbatch

    def timed_out(*args: Any, **more: Any) -> str:
        sbatch(*args, **more)
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out on send/recv operation")

    with monkeypatch.context() as patch:
        patch.setattr(project.slurm, "sbatch", timed_out)
        with pytest.raises(SlurmCommandError):
            run.resume()
    run.resume()
    assert run.record.job_ids == ["100", "101"]
    assert len(project.slurm.submissions) == 2


def test_second_resume_adopts_the_job_after_a_failed_queue_query(
    project: Project, run: Run, killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run, recorded=False)

    def silent(script: Any) -> list[str]:
        raise SlurmCommandError(["squeue"], 1, "Unable to contact slurm controller")

    with monkeypatch.context() as patch:
        patch.setattr(project.slurm, "jobs_of_script", silent)
        with pytest.raises(SlurmCommandError):
            run.resume()
    run.resume()
    assert len(project.slurm.submissions) == 2


def test_secrets_are_required_again_on_resume(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "planted")
    run = project.queue("environment.secrets=[TOKEN]")
    run.stop()
    monkeypatch.delenv("TOKEN")
    with pytest.raises(UserError, match="TOKEN"):
        run.resume()
    with entry.secrets_from(lambda names: dict.fromkeys(names, "from afar")):
        run.resume()
    assert [one.env["TOKEN"] for one in project.slurm.submissions] == ["planted", "from afar"]
    monkeypatch.delenv("TOKEN")
