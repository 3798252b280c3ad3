"""Naming a run by what one remembers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcaccel.errors import RunNotFound
from hpcaccel.rundir import RunDir
from hpcaccel.submission import Run, RunArray, all_runs, find_run
from tests.submission.conftest import Project


@pytest.fixture(autouse=True)
def readable_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that begin alike in pairs, in the order of submission."""
    numbers = iter(range(100))

    def new_run_id() -> str:
        number = next(numbers)
        return f"20260101-0000{number // 2:02}-a{number % 2}00"

    monkeypatch.setattr("hpcaccel.submission.prepare.new_run_id", new_run_id)


def test_by_every_name_it_has(project: Project) -> None:
    run = project.queue()
    other = project.queue(name="other")
    latest = project.queue()
    assert isinstance(run, Run)
    for token, expected in [
        (run.run_id, run),
        (run.run_id[:-3], None),
        ("demo", latest),
        ("other", other),
        (run.job_id, run),
        (other.job_id, other),
        (latest.run_id[:-3], latest),
        (str(run.path), run),
    ]:
        if expected is not None:
            assert find_run(token).path == expected.path, token


def test_from_any_directory(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = project.queue()
    monkeypatch.chdir(tmp_path)
    assert find_run(run.run_id).path == run.path


def test_without_an_index(project: Project, home: Path) -> None:
    run = project.queue()
    shutil.rmtree(home / "state")
    assert find_run("demo").path == run.path


def test_a_beginning_of_several(project: Project) -> None:
    runs = [project.queue(), project.queue()]
    with pytest.raises(RunNotFound, match="beginning of 2 run ids") as refusal:
        find_run(runs[0].run_id[:-3])
    for run in runs:
        assert run.run_id in str(refusal.value)


def test_nothing_like_it(project: Project) -> None:
    with pytest.raises(RunNotFound, match="there are no runs yet"):
        find_run("demo")
    project.queue()
    with pytest.raises(RunNotFound, match=r"Near it:\n  2026.*demo"):
        find_run("dmeo")


def test_a_run_that_was_deleted_is_forgotten(project: Project) -> None:
    shutil.rmtree(project.queue().path)
    with pytest.raises(RunNotFound):
        find_run("demo")


def test_a_damaged_record_hides_nothing(project: Project) -> None:
    broken, whole = project.queue(), project.queue()
    RunDir(broken.path).record.write_text("{")
    assert [run.path for run in all_runs()] == [whole.path]


def test_tasks_of_an_array(project: Project) -> None:
    array = project.queue(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    assert isinstance(find_run(array.run_id), RunArray)
    assert find_run(f"{array.run_id}_1").path == array[1].path
    assert find_run(f"{array.job_id}_0").path == array[0].path
    with pytest.raises(RunNotFound):
        find_run(f"{array.run_id}_7")


def test_a_resumed_run_answers_to_all_its_jobs(project: Project) -> None:
    run = project.queue()
    run.stop()
    run.resume()
    assert find_run("100").path == find_run("101").path == run.path
