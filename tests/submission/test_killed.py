"""Submissions killed at any moment: their job is found again or does not exist, and nothing else is left."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core import progress_notes
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import AttemptEnd, Lease, to_dict
from hpcaccel.errors import ClusterError, RunDirectoryError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.states import JobState
from hpcaccel.spec.loading.workflow import read_jobs
from hpcaccel.submission import Run, RunArray, all_runs, find_run
from hpcaccel.submission.jobs.job_submission import JobSubmission
from hpcaccel.submission.jobs.local import local_process
from hpcaccel.submission.runs.clean import delete, plan_cleaning
from hpcaccel.submission.runs.status import statuses
from hpcaccel.submission.submit.api import submit_jobs
from hpcaccel.sweeps.start_sweep import prepare_sweep, start_sweep
from tests.submission.conftest import Project, eventually
from tests.submission.killing import SharedSlurm, killed_at

SWEEP = """\
sweep:
  metric: loss
  workers: 3
  parameters: {args.lr: {float: [0.1, 1.0]}}
  max_trials: 3
"""
JOBS = """\
jobs:
  first: {entrypoint: {script: train.py}, slurm: {time: 10}}
  second: {entrypoint: {script: train.py}, slurm: {time: 10}, after: [first]}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> SharedSlurm:
    slurm = SharedSlurm()
    slurm.file = tmp_path / "slurm"
    return slurm


pytestmark = pytest.mark.usefixtures("told")


class Kind:
    """A kind of submission and its number of jobs."""

    def __init__(self, project: Project, name: str) -> None:
        self.project = project
        self.name = name
        self.jobs = {"chain": 3, "workflow": 2}.get(name, 1)
        project.write("sweep.yaml", project.path.joinpath("job.yaml").read_text() + SWEEP)
        project.write("jobs.yaml", JOBS)

    def submit(self) -> None:
        slurm = self.project.slurm
        if self.name == "sweep":
            start_sweep(prepare_sweep("sweep.yaml", cluster="slurm", slurm=slurm))
        elif self.name == "workflow":
            self._submit_workflow()
        elif self.name == "array":
            self.project.queue(grid=["args.lr=1,2,3"])
        elif self.name == "chain":
            self.project.queue("resilience.chain=4", "resilience.chain_ahead=2", "resilience.requeue=true")
        else:
            self.project.queue()

    def _submit_workflow(self) -> None:
        jobs = read_jobs(self.project.path / "jobs.yaml")
        assert jobs is not None
        submit_jobs(jobs, cluster="slurm", slurm=self.project.slurm)


def living(slurm: Any) -> list[str]:
    """IDs of unfinished jobs, without array indices."""
    found = {address.partition("_")[0] for address, job in slurm.seen().jobs.items() if not job.state.is_ended}
    return sorted(found, key=int)


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the first answer of the queue: if it shows no job, there is none."""
    monkeypatch.setattr("hpcaccel.submission.jobs.recovery.SETTLING_SECONDS", -1.0)


def check(kind: Kind, moment: int, number: int) -> bool:
    """Submit and die at ``moment``, read the states, clean, submit again. False if it ended before ``moment``."""
    project, slurm = kind.project, kind.project.slurm
    if not killed_at(moment, kind.submit, number=number):
        return False
    runs = all_runs(slurm=slurm)
    states = [run.status() for run in runs]
    assert all(one.state != "lost" for one in states), states
    jobs = living(slurm)  # read after the states: reading them replaces an incomplete chain
    for job_id in jobs:
        assert find_run(job_id, slurm=slurm).status().state == "pending", (moment, states)
    plan = plan_cleaning(runs, older_than_seconds=-1.0, whole_runs=True, slurm=slurm, folders=[project.runs])
    for item in plan.items:
        delete(item, slurm=slurm)
    left = {str(job.script.parent) for job in slurm.submissions if job.job_id in jobs}
    assert all(Path(path).is_dir() for path in left), "the directory of a pending job is gone"
    assert list(project.runs.glob("*/.*")) == []
    kind.submit()
    again = living(slurm)
    assert len(again) in {kind.jobs, kind.jobs + len(jobs)}, (moment, jobs, again)
    assert len(again) == kind.jobs or moment > 10, "only where the command had come to its end"
    hidden = [path.name for path in project.runs.glob("*/.*")]
    assert hidden == [], hidden
    for run in all_runs(slurm=slurm):
        if not run.status().ended:
            run.cancel()
    assert living(slurm) == [], "each job can be cancelled by its run"
    return True


KINDS = ["run", "array", "chain", "sweep", "workflow"]


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "hup"])
@pytest.mark.parametrize("name", KINDS)
def test_submission_killed_at_any_moment_loses_no_job(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    settle(monkeypatch)
    kind = Kind(project, name)
    moment = 0
    while check(kind, moment, number):
        moment += 1
    assert moment > 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "hup"])
@pytest.mark.parametrize("name", KINDS)
def test_job_of_a_submission_killed_after_sbatch_is_adopted(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """The job is in the queue, but its submitter dies before recording it."""
    settle(monkeypatch)
    kind = Kind(project, name)
    sbatch = SharedSlurm.sbatch

    def last_thing(slurm: SharedSlurm, *args: Any, **more: Any) -> str:
        job_id = sbatch(slurm, *args, **more)
        os.kill(os.getpid(), number)
        return job_id

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "sbatch", last_thing)
        assert killed_at(10**9, kind.submit, number=number)
    jobs = living(project.slurm)
    assert jobs
    assert [find_run(job_id, slurm=project.slurm).status().state for job_id in jobs] == ["pending"] * len(jobs)
    kind.submit()
    assert len(living(project.slurm)) == kind.jobs
    kind.submit()
    assert len(living(project.slurm)) == 2 * kind.jobs, "given once more it is meant"


def _killed_while_it_copies(project: Project, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hpcaccel.submission.submit.build.copy_code", lambda *_: os.kill(os.getpid(), number))
        assert killed_at(10**9, Kind(project, "run").submit, number=number)


def _not_permitted(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_leftovers_of_a_killed_submission_are_cleaned(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    _killed_while_it_copies(project, monkeypatch, signal.SIGKILL)
    (left,) = project.runs.glob("*/.*.tmp")
    assert plan_cleaning([], older_than_seconds=3600.0, folders=[project.runs]).items == ()
    os.utime(left, (1.0, 1.0))
    plan = plan_cleaning([], older_than_seconds=3600.0, folders=[project.runs])
    assert [(item.path, item.kind) for item in plan.items] == [(left, "unfinished")]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", _not_permitted)
        with pytest.raises(RunDirectoryError, match="cannot be deleted: Operation not permitted"):
            delete(plan.items[0])
    delete(plan.items[0])
    assert not left.exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=["hup", "term"])
def test_hangup_or_termination_undoes_a_submission(
    project: Project, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _killed_while_it_copies(project, monkeypatch, number)
    assert not project.runs.exists()


def test_submission_in_progress_is_pending_and_not_cleaned(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, str]] = []

    def look(*_: object) -> None:
        (run,) = all_runs(slurm=project.slurm)
        seen.append((run.status().state, run.status().detail))
        plan = plan_cleaning([run], older_than_seconds=-1.0, whole_runs=True, slurm=project.slurm)
        seen.append(([*plan.items], plan.kept[0][1]))

    monkeypatch.setattr("hpcaccel.submission.jobs.job_submission.JobSubmission.submit", lambda *_, **__: look())
    project.queue()
    assert seen == [("pending", "it is being submitted"), ([], "it is pending")]


def test_run_without_a_job_is_failed_and_can_be_resumed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "sbatch", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        assert killed_at(10**9, Kind(project, "run").submit)
    (run,) = all_runs(slurm=project.slurm)
    now = run.status()
    assert now.state == "failed"
    assert now.detail.startswith("the submission was interrupted before a job was created: nothing is running")
    run.resume()
    assert run.status().state == "pending"


@pytest.mark.parametrize(("name", "command"), [("array", "resume"), ("sweep", "sweep resume")])
def test_array_or_sweep_without_a_job_names_its_resume_command(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    settle(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "sbatch", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        assert killed_at(10**9, Kind(project, name).submit)
    (run,) = all_runs(slurm=project.slurm)
    now = run.status()
    assert now.state == "failed"
    for one in (now, *now.tasks):
        assert one.detail.endswith(f"nothing is running. Submit it with `hpcaccel {command} {run.run_id}`")


def test_tasks_outside_a_partial_resume_keep_their_state(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    array = project.queue(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    for task, reason in zip(array, ("completed", "failed"), strict=True):
        end = AttemptEnd(attempt=1, time=2.0, reason=reason, decision="end")  # type: ignore[arg-type]
        append_line(task.dir.ledger, to_dict(end))
    with JobSubmission(array.dir, slurm=project.slurm) as turn:
        turn.write_intent(indices=[1])
        now = array.status()
        assert [task.state for task in now.tasks] == ["completed", "pending"]
        assert [task.status().state for task in array] == ["completed", "pending"]


def test_unresponsive_slurm_is_queried_once_for_all_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        _killed_behind_sbatch(project, monkeypatch, partial(project.queue, f"name={name}"))
    asked = []

    def silent(_: object, script: Path) -> list[str]:
        asked.append(script)
        raise SlurmCommandError(["squeue"], 124, "no answer")

    monkeypatch.setattr(SharedSlurm, "jobs_of_script", silent)
    found = statuses([run.dir for run in all_runs()], project.slurm)
    assert len(asked) == 1
    assert ["it is unknown whether it has a job: squeue" in one.detail for one in found] == [True] * 3


def test_job_that_cannot_be_recorded_leaves_its_run_pending(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    _killed_behind_sbatch(project, monkeypatch, Kind(project, "run").submit)
    monkeypatch.setattr("hpcaccel.submission.jobs.recovery.record_job", _not_permitted)
    (now,) = statuses([run.dir for run in all_runs()], project.slurm)
    assert (now.state, now.job_id) == ("pending", "")
    assert "its job cannot be recorded: " in now.detail


def test_unresponsive_queue_leaves_the_submission_undecided(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    _killed_behind_sbatch(project, monkeypatch, Kind(project, "run").submit)
    slurm = project.slurm.seen()
    (run,) = all_runs(slurm=slurm)
    slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    slurm.save()
    now = run.status()
    assert (now.state, now.job_id) == ("pending", "")
    assert "it is unknown whether it has a job" in now.detail
    plan = plan_cleaning([run], older_than_seconds=-1.0, whole_runs=True, slurm=slurm)
    assert plan.items == ()
    slurm.unreachable = ""
    slurm.save()
    assert (run.status().state, run.job_id) == ("pending", "100")


@pytest.mark.parametrize("name", ["run", "sweep", "workflow"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClusterError("no squeue"), SlurmUnreachable(["squeue"], 1, "")])
def test_repeated_command_that_fails_in_recovery_can_be_repeated(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    kind = Kind(project, name)
    _killed_behind_sbatch(project, monkeypatch, kind.submit)

    def give_up(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "jobs_of_script", give_up)
        patch.setattr(SharedSlurm, "workers_of_script", give_up)
        with pytest.raises(type(error)):
            kind.submit()
    kind.submit()
    assert len(living(project.slurm)) == kind.jobs


@pytest.mark.parametrize("name", ["run", "sweep", "workflow"])
def test_submission_that_returns_an_earlier_run_shows_a_note(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settle(monkeypatch)
    kind = Kind(project, name)
    _killed_behind_sbatch(project, monkeypatch, kind.submit)
    token = progress_notes.SHOW_NOTE.set(None)
    with pytest.warns(UserWarning, match="was already submitted by the same command, .* repeat the command"):
        kind.submit()
    progress_notes.SHOW_NOTE.reset(token)


def test_repeated_submission_adopts_the_job_after_an_sbatch_timeout(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    sbatch = SharedSlurm.sbatch

    def timed_out(slurm: SharedSlurm, *args: Any, **more: Any) -> str:
        sbatch(slurm, *args, **more)
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out on send/recv operation")

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "sbatch", timed_out)
        with pytest.raises(SlurmCommandError, match=r"unknown whether Slurm accepted the job, so .* is kept"):
            project.queue()
    taken = project.queue()
    assert taken.job_id == "100"
    assert len(project.slurm.seen().submissions) == 1


def test_job_missing_from_the_queue_is_found_by_its_lease(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    _killed_behind_sbatch(project, monkeypatch, Kind(project, "run").submit)
    (run,) = all_runs(slurm=project.slurm)
    lease = Lease(job_id="100", restart_count=0, host="elsewhere", pid=1, pid_start=1, time=1.0)
    write_json(run.dir.lease, to_dict(lease))
    monkeypatch.setattr(SharedSlurm, "jobs_of_script", lambda *_: [])
    project.slurm.seen().move("100", JobState.RUNNING)
    project.slurm.save()
    assert (run.status().state, run.job_id) == ("starting", "100")


@pytest.mark.parametrize(
    ("name", "log"), [("run", "slurm.log"), ("array", "tasks/1/slurm.log"), ("sweep", "workers/1/slurm.log")]
)
def test_run_with_output_of_a_job_gone_from_the_queue_is_kept(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, log: str
) -> None:
    settle(monkeypatch)
    kind = Kind(project, name)
    _killed_behind_sbatch(project, monkeypatch, kind.submit)
    monkeypatch.setattr(SharedSlurm, "jobs_of_script", lambda *_: [])
    monkeypatch.setattr(SharedSlurm, "workers_of_script", lambda *_: {})
    (script,) = {one.script for one in project.slurm.seen().submissions}
    (script.parent / log).write_text("module: command not found")
    with pytest.raises(ClusterError, match=f"left the queue before its first attempt. See .*{log}"):
        kind.submit()
    assert script.exists()


def test_unrecorded_job_that_holds_the_lease_is_active_and_cancelled(project: Project) -> None:
    run = project.queue()
    assert isinstance(run, Run)
    slurm = project.slurm
    other = slurm.sbatch(run.dir.script)
    slurm.move("100", JobState.COMPLETED)
    slurm.move(other, JobState.RUNNING)
    slurm.save()
    lease = Lease(job_id=other, restart_count=0, host="elsewhere", pid=1, pid_start=1, time=1.0)
    write_json(run.dir.lease, to_dict(lease))
    assert run.status().state == "starting"
    run.cancel()
    assert other in slurm.seen().cancelled


def _killed_behind_sbatch(project: Project, monkeypatch: pytest.MonkeyPatch, submit: Callable[[], object]) -> None:
    sbatch = SharedSlurm.sbatch

    def last_thing(slurm: SharedSlurm, *args: Any, **more: Any) -> str:
        sbatch(slurm, *args, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlurm, "sbatch", last_thing)
        assert killed_at(10**9, submit)


# -- the local backend ------------------------------------------------------------------------------------------------


LOCAL_MOMENTS = range(0, 200)


@pytest.mark.chaos
def test_local_submission_killed_at_any_moment_loses_no_run(project: Project) -> None:
    for moment in LOCAL_MOMENTS:
        if not _killed_locally(project, moment):
            assert moment > 10
            return
    raise AssertionError("it has no end")


def test_local_job_of_a_submission_killed_before_its_record_fails(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local job waits until it is recorded, and ends if its submitter dies before that."""
    project.hold()
    die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("hpcaccel.submission.jobs.local.write_json", die)
        assert killed_at(10**9, project.start)
    (run,) = all_runs()
    assert run.status().state == "failed"
    again = project.start()
    assert len(all_runs()) == 1
    project.release()
    assert again.wait(120).state == "completed"


def test_local_job_started_by_a_killed_submission_is_adopted(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.hold()
    die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("hpcaccel.submission.jobs.job_submission.record_job", die)
        assert killed_at(10**9, project.start)
    (run,) = all_runs()
    assert run.status().state in ("starting", "running")
    again = project.start()
    assert again.path == run.path
    project.release()
    assert again.wait(120).state == "completed"


def _killed_locally(project: Project, moment: int) -> bool:
    project.hold()
    if not killed_at(moment, project.start):
        project.release()
        return False
    assert all(run.status().state != "lost" for run in all_runs())
    open_runs = [run for run in all_runs() if not run.status().ended]
    alive = [run.path for run in open_runs if (process := local_process(run.dir)) and process.is_alive]
    again = project.start()
    assert alive in ([], [again.path]) or moment > 10
    project.release()
    eventually(lambda: all(run.status().ended for run in all_runs()))
    return True
