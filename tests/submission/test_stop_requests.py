"""Stopping, cancelling and going on, as Slurm sees it."""

from __future__ import annotations

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, AttemptStart, to_dict
from hpcaccel.core.stop_requests import mark_honoured, open_requests
from hpcaccel.errors import ClusterError, RunBusy, SlurmCommandError, UserError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.control import Then, asked_as
from tests.submission.conftest import Project


@pytest.fixture
def run(project: Project) -> Run:
    run = project.queue()
    assert isinstance(run, Run)
    return run


@pytest.fixture
def array(project: Project) -> RunArray:
    array = project.queue(grid=["args.lr=1,2,3"])
    assert isinstance(array, RunArray)
    return array


def begin(project: Project, run: Run) -> None:
    project.slurm.move(run.job_id, JobState.RUNNING)
    append_line(run.dir.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id=run.job_id)))


def finish(run: Run, reason: str = "completed", decision: str = "end") -> None:
    line = AttemptEnd(attempt=1, time=2.0, reason=reason, decision=decision)  # type: ignore[arg-type]
    append_line(run.dir.ledger, to_dict(line))


def wishes(run: Run) -> list[str]:
    return [request.then for _, request in open_requests(run.dir)]


def test_a_running_job_is_asked_and_not_killed(project: Project, run: Run) -> None:
    begin(project, run)
    run.stop("requeue")
    assert wishes(run) == ["requeue"]
    assert project.slurm.jobs[run.job_id].state is JobState.RUNNING


def test_a_stop_reaches_a_job_that_starts_at_this_moment(project: Project, run: Run) -> None:
    project.slurm.move(run.job_id, JobState.RUNNING)
    run.stop()
    assert wishes(run) == ["pause"]
    assert project.slurm.jobs[run.job_id].state is JobState.RUNNING


def test_a_waiting_job_is_paused_by_leaving_the_queue(project: Project, run: Run) -> None:
    run.stop()
    assert run.status().state == "paused"
    run.resume()
    assert (run.status().state, run.job_id, wishes(run)) == ("pending", "101", [])


@pytest.mark.parametrize(("then", "words"), [("requeue", "it is already queued"), ("finish", "loop is not running")])
def test_what_a_waiting_job_cannot_do(run: Run, then: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run.stop(then)  # type: ignore[arg-type]
    assert wishes(run) == []


def test_a_program_that_signals_stop_cannot_finish(project: Project, run: Run) -> None:
    begin(project, run)
    with pytest.raises(UserError, match="do not support 'finish'"):
        run.stop("finish")
    assert wishes(run) == []


def test_what_runs_is_stopped_without_a_word_to_slurm(project: Project, run: Run) -> None:
    begin(project, run)
    project.slurm.unreachable = "Unable to contact slurm controller"
    run.stop()
    assert wishes(run) == ["pause"]


def test_the_wish_to_cancel_is_written_before_slurm_kills(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(project.slurm, "cancel", lambda job_id, **_: seen.append(wishes(run)))
    run.cancel()
    assert seen == [["cancel"]]


def test_cancelled(project: Project, run: Run) -> None:
    run.cancel()
    assert project.slurm.cancelled == [run.job_id]
    assert run.status().state == "cancelled"


@pytest.mark.parametrize("what", ["stop", "cancel"])
def test_what_has_ended_cannot_be_ended(project: Project, run: Run, what: str) -> None:
    finish(run)
    project.slurm.move(run.job_id, JobState.COMPLETED)
    with pytest.raises(UserError, match="is completed: there is nothing to"):
        getattr(run, what)()


def test_a_job_that_slurm_holds_after_the_end_is_taken_out(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "failed")
    with pytest.raises(UserError, match="nothing to cancel"):
        run.cancel()  # it runs: Slurm is about to learn of the end
    project.slurm.move(run.job_id, JobState.REQUEUE_HOLD, reason="job_requeued_in_held_state")
    with pytest.warns(UserWarning, match=f"already ended .failed., but job {run.job_id} is still in the queue .held"):
        run.cancel()
    assert project.slurm.cancelled == [run.job_id]
    with pytest.raises(UserError, match="nothing to cancel"):
        run.cancel()


def test_a_resume_takes_a_held_job_out_before(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "failed")
    held = run.job_id
    project.slurm.move(held, JobState.REQUEUE_HOLD)
    run.resume()
    assert project.slurm.cancelled == [held]
    assert run.job_id != held


def test_a_resume_that_cannot_take_a_held_job_out_changes_nothing(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(project, run)
    run.stop()
    finish(run, "failed")
    project.slurm.move(run.job_id, JobState.REQUEUE_HOLD)

    def timed_out(*_: object, **__: object) -> str:
        raise SlurmCommandError(["scancel"], 1, "Socket timed out on send/recv operation")

    monkeypatch.setattr(project.slurm, "cancel", timed_out)
    with pytest.raises(SlurmCommandError, match=r"send/recv operation$"):
        run.resume()
    assert len(open_requests(run.dir)) == 1
    assert not run.dir.resuming.exists()


def test_an_array_is_cancelled_by_one_command(project: Project, array: RunArray) -> None:
    finish(array[1])
    array.cancel()
    assert project.slurm.cancelled == ["100"]
    assert [task.state for task in array.status().tasks] == ["cancelled", "completed", "cancelled"]


def test_one_task_is_cancelled_alone(project: Project, array: RunArray) -> None:
    array[2].cancel()
    assert project.slurm.cancelled == ["100_2"]
    assert [task.state for task in array.status().tasks] == ["pending", "pending", "cancelled"]


# -- asked once more, since the answer to the first time was lost ---------------------------------------------------


def honour(run: Run) -> None:
    for name, _ in open_requests(run.dir):
        mark_honoured(run.dir, name)


@pytest.mark.parametrize("then", ["requeue", "pause"])
def test_a_stop_that_is_repeated_asks_for_nothing_new(project: Project, run: Run, then: Then) -> None:
    begin(project, run)
    for _ in range(2):
        with asked_as("abcd"):
            run.stop(then)
    assert wishes(run) == [then], "it is still open"
    honour(run)
    states = [JobState.RUNNING, JobState.PENDING, JobState.COMPLETED]  # it has come back, waits, has ended
    for state in states:
        project.slurm.move(run.job_id, state)
        with asked_as("abcd"):
            run.stop(then)
        assert (wishes(run), project.slurm.cancelled) == ([], [])
    project.slurm.move(run.job_id, JobState.RUNNING)
    with asked_as("other"):
        run.stop(then)
    assert wishes(run) == [then]


def test_a_stop_that_was_killed_half_way_is_finished(project: Project, array: RunArray) -> None:
    for index in range(3):
        project.slurm.move(f"{array.job_id}_{index}", JobState.RUNNING)
    with asked_as("abcd"):
        array[0].stop()
        honour(array[0])
        array[1].stop()
        array.stop()
    assert [wishes(task) for task in (array[0], array[1], array[2])] == [[], ["pause"], ["pause"]]


def test_a_pause_that_was_killed_before_it_left_the_queue_leaves_it(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, asked_as("abcd"):
        patch.setattr(control, "cancel_waiting", killed)
        with pytest.raises(KeyboardInterrupt):
            run.stop()
    with asked_as("abcd"):
        run.stop()
    assert (project.slurm.cancelled, wishes(run)) == ([run.job_id], ["pause"])


def test_a_cancel_that_is_repeated_leaves_what_was_resumed_meanwhile(project: Project, run: Run) -> None:
    for _ in range(2):
        with asked_as("abcd"):
            run.cancel()
    assert (wishes(run), project.slurm.cancelled) == (["cancel"], [run.job_id, run.job_id]), "not yet known to be done"
    project.slurm.move(run.job_id, JobState.CANCELLED)
    run.resume()
    with asked_as("abcd"):
        run.cancel()
    assert (wishes(run), len(project.slurm.cancelled)) == ([], 2)
    with asked_as("other"):
        run.cancel()
    assert wishes(run) == ["cancel"]


# -- going on -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_a_new_job_with_the_same_script(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "stop", "pause")
    run.resume()
    first, second = project.slurm.submissions
    assert (second.text, second.script) == (first.text, first.script)
    assert run.record.job_ids == ["100", "101"]


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING])
def test_an_active_run_is_not_resumed(project: Project, run: Run, state: JobState) -> None:
    project.slurm.move(run.job_id, state)
    with pytest.raises(RunBusy, match="Stop it first"):
        run.resume()
    assert len(project.slurm.submissions) == 1


def test_a_completed_run_is_not_resumed(run: Run) -> None:
    finish(run)
    with pytest.raises(UserError, match="is completed"):
        run.resume()


def test_a_resume_that_slurm_refuses_changes_nothing(project: Project, run: Run) -> None:
    run.stop()
    before = sorted(path.name for path in run.path.rglob("*"))
    project.slurm.refuse = "the account is out of hours"
    with pytest.raises(ClusterError, match="out of hours"):
        run.resume()
    assert run.status().state == "paused"
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_of_an_array_only_what_is_not_done_goes_on(project: Project, array: RunArray) -> None:
    finish(array[0])
    finish(array[1], "failed")
    finish(array[2], "stop", "pause")
    array.resume()
    assert project.slurm.submissions[-1].args == ("--array=1-2",)
    assert [run.job_id for run in array] == ["100_0", "101_1", "101_2"]
    assert [task.state for task in array.status().tasks] == ["completed", "requeued", "requeued"]


def test_one_task_goes_on_alone(project: Project, array: RunArray) -> None:
    for run in array:
        finish(run, "failed")
    array[2].resume()
    assert project.slurm.submissions[-1].args == ("--array=2",)
    assert [task.state for task in array.status().tasks] == ["failed", "failed", "requeued"]


@pytest.mark.parametrize("what", ["stop", "cancel"])
def test_a_request_that_slurm_does_not_hear_of_stands(project: Project, what: str) -> None:
    run = project.queue()
    project.slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmCommandError, match=rf"The request to {what} {run.run_id} is saved in the run directory"):
        getattr(run, what)()
    assert [request.reason for _, request in open_requests(run.dir)] == [{"stop": "stop", "cancel": "cancelled"}[what]]


def test_a_resume_that_slurm_may_have_taken_leaves_the_stop_behind(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that it took would read an open request, and end."""
    run = project.queue()
    run.stop()

    def timed_out(*_: object, **__: object) -> str:
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out on send/recv operation")

    monkeypatch.setattr(project.slurm, "sbatch", timed_out)
    with pytest.raises(SlurmCommandError, match="unknown whether Slurm accepted the job"):
        run.resume()
    assert open_requests(run.dir) == []
