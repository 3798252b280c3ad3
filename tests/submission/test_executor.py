"""The executor and jobs based on submitit."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit import SlurmExecutor

from hpcaccel.core.durable_files import append_line, read_lines
from hpcaccel.core.records import AttemptEnd, to_dict
from hpcaccel.errors import SpecError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission import Run, RunArray
from hpcaccel.submission.jobs.submitit_executor import RunExecutor
from hpcaccel.submission.runs.submitit_job import RunJob, RunWatcher
from tests.submission.conftest import Project


@pytest.fixture(autouse=True)
def one_slurm(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the in-memory Slurm to submitit jobs, which create their own."""
    monkeypatch.setattr("hpcaccel.slurm.queue_cache.Slurm", lambda **_: project.slurm)
    monkeypatch.setattr("hpcaccel.submission.runs.control.Slurm", lambda: project.slurm)
    monkeypatch.setattr(RunJob, "watcher", RunWatcher())


@pytest.fixture
def run(project: Project) -> Run:
    run = project.queue()
    assert isinstance(run, Run)
    return run


def complete(run: Run) -> None:
    append_line(run.dir.ledger, to_dict(AttemptEnd(attempt=1, time=1.0, reason="completed", decision="end")))


def test_executor_and_job_extend_those_of_submitit(tmp_path: Path) -> None:
    assert issubclass(RunExecutor, SlurmExecutor)
    assert issubclass(RunJob, RunExecutor.job_class)


def test_array_is_rendered_by_the_hpcaccel_template(project: Project) -> None:
    array = project.queue(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    (submission,) = project.slurm.submissions
    assert "#SBATCH --array=0-1" in submission.text
    assert "node.pyz" in submission.text
    assert "submitit.core._submit" not in submission.text


def test_grid_with_one_task_is_an_array(project: Project) -> None:
    array = project.queue(grid=["args.lr=1"])
    assert isinstance(array, RunArray)
    assert [job.job_id for job in array.jobs] == ["100_0"]


def test_pickles_have_the_names_that_submitit_expects(project: Project, run: Run) -> None:
    assert run.job.task(1).paths.submitted_pickle == run.dir.submitit / "100_submitted.pkl"
    assert run.job.task(1).paths.result_pickle == run.dir.submitit / "100_1_result.pkl"
    array = project.queue(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    for index, job in enumerate(array.jobs):
        assert job.task(0).paths.submitted_pickle.exists()
        assert job.task(0).paths.submitted_pickle.parent == array[index].dir.submitit
    assert [path for path in array.path.rglob("*.pkl") if path.name.startswith(".")] == []


def test_result_of_an_earlier_attempt_does_not_end_a_job(run: Run) -> None:
    job = run.job.task(0)
    job.paths.result_pickle.write_bytes(b"of an earlier attempt")
    assert not job.done()
    complete(run)
    assert job.done()


def test_preempted_job_is_not_done(project: Project, run: Run) -> None:
    project.slurm.move(run.job_id, JobState.REQUEUED)
    assert not run.job.done(force_check=True)


def test_all_jobs_of_a_process_share_one_queue_query(project: Project) -> None:
    runs = [run for run in (project.queue() for _ in range(4)) if isinstance(run, Run)]
    jobs = [run.job for run in runs]
    project.slurm.calls.clear()
    for _ in range(50):
        for job in jobs:
            assert not job.done()
    assert project.slurm.calls == ["queue"]


def test_cancel_of_a_job_cancels_its_run(project: Project, run: Run) -> None:
    run.job.cancel()
    assert project.slurm.cancelled == ["100"]
    assert run.status().state == "cancelled"
    run.job.cancel(check=False)


def test_stdout_of_a_task_is_the_log_of_the_last_attempt(run: Run) -> None:
    assert run.job.task(1).stdout() is None
    for attempt in (2, 10):
        run.dir.attempt(attempt).mkdir()
        run.dir.rank_log(attempt, 1).write_text(f"attempt {attempt}")
    assert run.job.task(1).stdout() == "attempt 10"


def test_journal_lists_overrides_and_run_id_of_each_task(project: Project) -> None:
    array = project.queue(grid=["args.lr=1,2", "runtime.seed=3"])
    assert isinstance(array, RunArray)
    lines = [line for line, _ in read_lines(array.dir.journal)]
    assert lines == [
        {"index": index, "overrides": {"args.lr": str(index + 1), "runtime.seed": "3"}, "run_id": array[index].run_id}
        for index in range(2)
    ]
    assert [run.record.overrides for run in array] == [line["overrides"] for line in lines]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (["args.lr=1e-3,0.001"], "result in the same run"),
        (["slurm.nodes=1,2"], "different batch scripts"),
        (["name=a,b"], "different batch scripts"),
        (["args.lr=1,2", "args.lr=3"], "already an axis"),
        (["args.lr"], "key=a,b,c"),
        (["args.lr=1,"], "empty"),
        (["slurm.partitoin=a,b"], "partition"),
    ],
)
def test_invalid_grid_is_refused(project: Project, grid: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        project.queue(grid=grid)
    assert project.slurm.submissions == []
    assert project.left() == []
