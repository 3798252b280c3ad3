"""Stop, cancel and resume: requests in the run directory and commands to Slurm."""

from __future__ import annotations

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, AttemptStart, to_dict
from hpcaccel.core.stop_requests import mark_honoured, open_requests
from hpcaccel.errors import ClusterError, RunBusy, SlurmCommandError, UserError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray
from hpcaccel.submission.runs import control
from hpcaccel.submission.runs.control import Then, named_requests
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


def test_stop_of_a_running_job_writes_a_request_and_cancels_nothing(project: Project, run: Run) -> None:
    begin(project, run)
    run.stop("requeue")
    assert wishes(run) == ["requeue"]
    assert project.slurm.jobs[run.job_id].state is JobState.RUNNING


def test_stop_of_a_starting_job_writes_a_request(project: Project, run: Run) -> None:
    project.slurm.move(run.job_id, JobState.RUNNING)
    run.stop()
    assert wishes(run) == ["pause"]
    assert project.slurm.jobs[run.job_id].state is JobState.RUNNING


def test_pause_of_a_pending_job_removes_it_from_the_queue(project: Project, run: Run) -> None:
    run.stop()
    assert run.status().state == "paused"
    run.resume()
    assert (run.status().state, run.job_id, wishes(run)) == ("pending", "101", [])


@pytest.mark.parametrize(("then", "words"), [("requeue", "it is already queued"), ("finish", "loop is not running")])
def test_pending_job_refuses_requeue_and_finish(run: Run, then: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run.stop(then)  # type: ignore[arg-type]
    assert wishes(run) == []


def test_finish_is_refused_for_a_program_stopped_by_signals(project: Project, run: Run) -> None:
    begin(project, run)
    with pytest.raises(UserError, match="does not support 'finish'"):
        run.stop("finish")
    assert wishes(run) == []


def test_running_job_is_stopped_while_slurm_is_unreachable(project: Project, run: Run) -> None:
    begin(project, run)
    project.slurm.unreachable = "Unable to contact slurm controller"
    run.stop()
    assert wishes(run) == ["pause"]


def test_cancel_request_is_written_before_scancel(project: Project, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(project.slurm, "cancel", lambda job_id, **_: seen.append(wishes(run)))
    run.cancel()
    assert seen == [["cancel"]]


def test_cancel_of_a_pending_job_cancels_it_in_slurm(project: Project, run: Run) -> None:
    run.cancel()
    assert project.slurm.cancelled == [run.job_id]
    assert run.status().state == "cancelled"


@pytest.mark.parametrize("what", ["stop", "cancel"])
def test_completed_run_cannot_be_stopped_or_cancelled(project: Project, run: Run, what: str) -> None:
    finish(run)
    project.slurm.move(run.job_id, JobState.COMPLETED)
    with pytest.raises(UserError, match="is completed: there is nothing to"):
        getattr(run, what)()


def test_cancel_removes_the_held_job_of_an_ended_run(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "failed")
    with pytest.raises(UserError, match="nothing to cancel"):
        run.cancel()  # its job is still running and about to end
    project.slurm.move(run.job_id, JobState.REQUEUE_HOLD, reason="job_requeued_in_held_state")
    with pytest.warns(UserWarning, match=f"already ended .failed., but job {run.job_id} is still in the queue .held"):
        run.cancel()
    assert project.slurm.cancelled == [run.job_id]
    with pytest.raises(UserError, match="nothing to cancel"):
        run.cancel()


def test_resume_cancels_a_held_job_first(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "failed")
    held = run.job_id
    project.slurm.move(held, JobState.REQUEUE_HOLD)
    run.resume()
    assert project.slurm.cancelled == [held]
    assert run.job_id != held


def test_resume_changes_nothing_if_a_held_job_cannot_be_cancelled(
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


def test_array_is_cancelled_by_one_scancel(project: Project, array: RunArray) -> None:
    finish(array[1])
    array.cancel()
    assert project.slurm.cancelled == ["100"]
    assert [task.state for task in array.status().tasks] == ["cancelled", "completed", "cancelled"]


def test_single_task_can_be_cancelled(project: Project, array: RunArray) -> None:
    array[2].cancel()
    assert project.slurm.cancelled == ["100_2"]
    assert [task.state for task in array.status().tasks] == ["pending", "pending", "cancelled"]


# -- commands repeated because the first reply was lost -------------------------------------------------------------


def honour(run: Run) -> None:
    for name, _ in open_requests(run.dir):
        mark_honoured(run.dir, name)


@pytest.mark.parametrize("then", ["requeue", "pause"])
def test_repeated_stop_command_writes_no_second_request(project: Project, run: Run, then: Then) -> None:
    begin(project, run)
    for _ in range(2):
        with named_requests("abcd"):
            run.stop(then)
    assert wishes(run) == [then], "it is still open"
    honour(run)
    states = [JobState.RUNNING, JobState.PENDING, JobState.COMPLETED]  # requeued and running, pending, ended
    for state in states:
        project.slurm.move(run.job_id, state)
        with named_requests("abcd"):
            run.stop(then)
        assert (wishes(run), project.slurm.cancelled) == ([], [])
    project.slurm.move(run.job_id, JobState.RUNNING)
    with named_requests("other"):
        run.stop(then)
    assert wishes(run) == [then]


def test_repeated_stop_of_an_array_stops_the_remaining_tasks(project: Project, array: RunArray) -> None:
    for index in range(3):
        project.slurm.move(f"{array.job_id}_{index}", JobState.RUNNING)
    with named_requests("abcd"):
        array[0].stop()
        honour(array[0])
        array[1].stop()
        array.stop()
    assert [wishes(task) for task in (array[0], array[1], array[2])] == [[], ["pause"], ["pause"]]


def test_repeated_pause_removes_the_job_from_the_queue(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, named_requests("abcd"):
        patch.setattr(control, "cancel_waiting", killed)
        with pytest.raises(KeyboardInterrupt):
            run.stop()
    with named_requests("abcd"):
        run.stop()
    assert (project.slurm.cancelled, wishes(run)) == ([run.job_id], ["pause"])


def test_repeated_cancel_command_does_not_cancel_a_resumed_run(project: Project, run: Run) -> None:
    for _ in range(2):
        with named_requests("abcd"):
            run.cancel()
    assert (wishes(run), project.slurm.cancelled) == (["cancel"], [run.job_id, run.job_id]), "not yet known to be done"
    project.slurm.move(run.job_id, JobState.CANCELLED)
    run.resume()
    with named_requests("abcd"):
        run.cancel()
    assert (wishes(run), len(project.slurm.cancelled)) == ([], 2)
    with named_requests("other"):
        run.cancel()
    assert wishes(run) == ["cancel"]


# -- resume ---------------------------------------------------------------------------------------------------------


def test_resumed_run_gets_a_new_job_with_the_same_script(project: Project, run: Run) -> None:
    begin(project, run)
    finish(run, "stop", "pause")
    run.resume()
    first, second = project.slurm.submissions
    assert (second.text, second.script) == (first.text, first.script)
    assert run.record.job_ids == ["100", "101"]


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING])
def test_active_run_cannot_be_resumed(project: Project, run: Run, state: JobState) -> None:
    project.slurm.move(run.job_id, state)
    with pytest.raises(RunBusy, match="Stop it first"):
        run.resume()
    assert len(project.slurm.submissions) == 1


def test_completed_run_cannot_be_resumed(run: Run) -> None:
    finish(run)
    with pytest.raises(UserError, match="is completed"):
        run.resume()


def test_resume_refused_by_slurm_changes_nothing(project: Project, run: Run) -> None:
    run.stop()
    before = sorted(path.name for path in run.path.rglob("*"))
    project.slurm.refuse = "the account is out of hours"
    with pytest.raises(ClusterError, match="out of hours"):
        run.resume()
    assert run.status().state == "paused"
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_resume_of_an_array_submits_only_tasks_not_completed(project: Project, array: RunArray) -> None:
    finish(array[0])
    finish(array[1], "failed")
    finish(array[2], "stop", "pause")
    array.resume()
    assert project.slurm.submissions[-1].args == ("--array=1-2",)
    assert [run.job_id for run in array] == ["100_0", "101_1", "101_2"]
    assert [task.state for task in array.status().tasks] == ["completed", "requeued", "requeued"]


def test_single_task_can_be_resumed(project: Project, array: RunArray) -> None:
    for run in array:
        finish(run, "failed")
    array[2].resume()
    assert project.slurm.submissions[-1].args == ("--array=2",)
    assert [task.state for task in array.status().tasks] == ["failed", "failed", "requeued"]


@pytest.mark.parametrize("what", ["stop", "cancel"])
def test_request_is_saved_while_slurm_is_unreachable(project: Project, what: str) -> None:
    run = project.queue()
    project.slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmCommandError, match=rf"The request to {what} {run.run_id} is saved in the run directory"):
        getattr(run, what)()
    assert [request.reason for _, request in open_requests(run.dir)] == [{"stop": "stop", "cancel": "cancelled"}[what]]


def test_resume_after_an_sbatch_timeout_clears_the_stop_request(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accepted job would read an open request and end."""
    run = project.queue()
    run.stop()

    def timed_out(*_: object, **__: object) -> str:
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out on send/recv operation")

    monkeypatch.setattr(project.slurm, "sbatch", timed_out)
    with pytest.raises(SlurmCommandError, match="unknown whether Slurm accepted the job"):
        run.resume()
    assert open_requests(run.dir) == []
