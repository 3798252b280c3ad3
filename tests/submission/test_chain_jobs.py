"""Chains of jobs as seen on the login node: submission, state, cancel, pause and resume."""

from __future__ import annotations

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, AttemptStart, to_dict
from hpcaccel.errors import ClusterError, SpecError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, find_run
from tests.submission.conftest import Project

CHAIN = ("resilience.requeue=true", "resilience.chain=5")


@pytest.fixture
def run(project: Project) -> Run:
    run = project.queue(*CHAIN)
    assert isinstance(run, Run)
    return run


def attempt(run: Run, job_id: str, *end: str) -> None:
    append_line(run.dir.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id=job_id)))
    if end:
        line = AttemptEnd(attempt=1, time=2.0, reason=end[0], decision=end[1])  # type: ignore[arg-type]
        append_line(run.dir.ledger, to_dict(line))


def test_chain_job_depends_on_all_jobs_before_it(project: Project, run: Run) -> None:
    first, second, third = project.slurm.submissions
    assert (second.script, third.script) == (first.script, first.script)
    assert second.args == ("--dependency=afterany:100", "--begin=now")
    assert third.args == ("--dependency=afterany:100:101", "--begin=now")
    assert (run.record.job_ids, run.record.links) == (["100"], ["100", "101", "102"])
    assert "#SBATCH --no-requeue" in first.text


def test_each_chain_job_has_a_copy_of_the_submitted_pickle(run: Run) -> None:
    pickles = [(run.dir.submitit / f"{job_id}_submitted.pkl").read_bytes() for job_id in run.record.links]
    assert len(pickles) == 3
    assert pickles == pickles[:1] * 3


@pytest.mark.parametrize(("settings", "count"), [(("resilience.chain_ahead=4",), 5), (("resilience.chain=2",), 2)])
def test_queued_chain_jobs_never_exceed_the_chain_length(
    project: Project, settings: tuple[str, ...], count: int
) -> None:
    project.queue(*CHAIN, *settings)
    assert len(project.slurm.submissions) == count


def test_refused_chain_job_cancels_the_jobs_before_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = project.slurm.sbatch

    def refuses_the_third(*args: object) -> object:
        if len(project.slurm.submissions) == 2:
            raise ClusterError("Slurm refused the job: QOSMaxSubmitJobPerUserLimit")
        return sbatch(*args)

    monkeypatch.setattr(project.slurm, "sbatch", refuses_the_third)
    with pytest.raises(ClusterError, match="QOSMaxSubmit"):
        project.queue(*CHAIN)
    assert project.slurm.cancelled == ["101", "100"]
    assert project.left() == []


def test_chain_of_an_array_is_refused(project: Project) -> None:
    with pytest.raises(SpecError, match=r"resilience\.chain 5 works in single jobs only"):
        project.queue(*CHAIN, grid=["args.lr=1,2"])
    assert project.slurm.submissions == []


def test_chain_without_requeue_is_refused(project: Project) -> None:
    with pytest.raises(SpecError, match=r"resilience\.chain conflicts with requeue: false"):
        project.queue("resilience.chain=5")


def test_run_state_follows_its_first_unfinished_chain_job(project: Project, run: Run) -> None:
    project.slurm.move("100", JobState.RUNNING)
    assert run.status().state == "starting"
    attempt(run, "100", "preempted", "requeue")
    project.slurm.move("100", JobState.PREEMPTED)
    assert run.status().state == "requeued"
    project.slurm.move("101", JobState.RUNNING)
    assert run.status().state == "starting"
    for job_id in ("101", "102"):
        project.slurm.move(job_id, JobState.PREEMPTED)
    assert run.status().state == "lost"


def test_run_is_found_by_each_of_its_chain_jobs(run: Run) -> None:
    assert [find_run(job_id).run_id for job_id in run.record.links] == [run.run_id] * 3


def test_cancel_of_a_chain_cancels_the_last_job_first(project: Project, run: Run) -> None:
    project.slurm.move("100", JobState.RUNNING)
    run.cancel()
    assert project.slurm.cancelled == ["102", "101", "100"]
    assert run.status().state == "cancelled"


def test_pause_between_two_chain_jobs_cancels_the_queued_ones(project: Project, run: Run) -> None:
    attempt(run, "100", "preempted", "requeue")
    project.slurm.move("100", JobState.PREEMPTED)
    run.stop()
    assert {project.slurm.jobs[job_id].state for job_id in ("101", "102")} == {JobState.CANCELLED}
    assert run.status().state == "paused"


def test_resume_submits_a_new_chain(project: Project, run: Run) -> None:
    attempt(run, "100", "stop", "pause")  # and the job ended before it could cancel the others
    project.slurm.move("100", JobState.FAILED)
    run.resume()
    assert {project.slurm.jobs[job_id].state for job_id in ("101", "102")} == {JobState.CANCELLED}
    assert (run.record.job_ids, run.record.links) == (["100", "103"], ["103", "104", "105"])
    assert run.status().state == "requeued"
