"""A resume that is killed at some point and made again: one new job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcaccel.errors import RunBusy, SlurmCommandError, UserError
from hpcaccel.records import AttemptEnd, to_dict
from hpcaccel.rundir import append_line
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray, recording, resume_once
from hpcaccel.submission import secrets as resume_secrets
from hpcaccel.submission.run import open_run
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
    """Resume as far as a process gets that is killed behind sbatch, or behind the record too."""

    def resume(run: Run | RunArray, *, recorded: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(resume_once.Turn, "done", lambda turn: None)
            if not recorded:
                patch.setattr(recording, "write_record", lambda *args, **more: None)
            run.resume()

    return resume


@pytest.mark.parametrize("recorded", [False, True])
def test_the_next_one_takes_up_its_job(project: Project, run: Run, killed: Killed, recorded: bool) -> None:
    killed(run, recorded=recorded)
    run.resume()
    assert run.record.job_ids == ["100", "101"]
    assert len(project.slurm.submissions) == 2
    assert run.status().state == "pending"
    with pytest.raises(RunBusy):
        run.resume()


def test_it_is_found_by_another_path_of_the_run_too(project: Project, run: Run, killed: Killed) -> None:
    killed(run, recorded=False)
    (project.path / "link").symlink_to(project.runs)
    other = open_run(project.path / "link" / run.path.relative_to(project.runs), slurm=project.slurm)
    with resume_once.Turn(run.dir), pytest.raises(resume_once.Underway):
        resume_once.Turn(other.dir, wait=False).__enter__()
    assert other.status().state == "pending"
    assert run.record.job_ids == ["100", "101"]


@pytest.mark.parametrize("recorded", [False, True])
def test_of_an_array_too(project: Project, killed: Killed, recorded: bool) -> None:
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


def test_a_job_that_has_ended_meanwhile_is_followed_by_another(project: Project, run: Run, killed: Killed) -> None:
    killed(run, recorded=False)
    project.slurm.move("101", JobState.FAILED)
    append_line(run.dir.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, reason="failed", decision="end")))
    run.resume()
    assert run.record.job_ids == ["100", "101", "102"]


def test_one_that_was_killed_before_sbatch_is_made_anew(project: Project, run: Run) -> None:
    long_ago = resume_once.Turn(run.dir, slurm=project.slurm, now=lambda: 1.0)
    long_ago.begin()
    run.resume()
    assert run.record.job_ids == ["100", "101"]
    assert not run.dir.resuming.exists()


def test_a_controller_that_did_not_answer_may_have_taken_the_job(
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


def test_a_queue_that_does_not_answer_leaves_the_question_open(
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


def test_secrets_are_needed_once_more(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "planted")
    run = project.queue("environment.secrets=[TOKEN]")
    run.stop()
    monkeypatch.delenv("TOKEN")
    with pytest.raises(UserError, match="TOKEN"):
        run.resume()
    with resume_secrets.secrets_from(lambda names: dict.fromkeys(names, "from afar")):
        run.resume()
    assert [one.env["TOKEN"] for one in project.slurm.submissions] == ["planted", "from afar"]
    monkeypatch.delenv("TOKEN")
