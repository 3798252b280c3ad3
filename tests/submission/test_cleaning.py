"""What `clean` proposes and deletes, and what it never touches."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files import pin
from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptEnd, to_dict
from hpcaccel.errors import RunDirectoryError
from hpcaccel.slurm.states import JobState
from hpcaccel.submission.jobs.run_state import write_record
from hpcaccel.submission.runs import clean, deletable, run_index
from hpcaccel.submission.runs.clean import Origins, delete, plan_cleaning


@pytest.fixture(autouse=True)
def good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint with a readable manifest is good; other criteria have their own tests."""

    def read(path: Path) -> dict[str, Any]:
        manifest = checkpoint_files.read_manifest(path)
        if manifest is None:
            from hpcaccel.errors import Damaged

            raise Damaged(str(path))
        return manifest

    monkeypatch.setattr(sealed, "read", read)


def checkpoint(run: Any, step: int, *, damaged: bool = False) -> Path:
    path: Path = run.dir.checkpoints / checkpoint_files.checkpoint_name(step)
    path.mkdir()
    (path / "data").write_bytes(b"x" * 1000)
    if not damaged:
        (path / checkpoint_files.MANIFEST).write_text(json.dumps({"step": step}))
    return path


def end(run: Any, reason: str, decision: str = "end") -> None:
    line = AttemptEnd(attempt=1, time=time.time(), reason=reason, decision=decision)  # type: ignore[arg-type]
    append_line(run.dir.ledger, to_dict(line))


def plan(project: Any, *runs: Any, **options: Any) -> Any:
    return plan_cleaning(runs, older_than_seconds=options.pop("age", 0), slurm=project.slurm, **options)


def names(found: Any) -> list[str]:
    return [item.path.name for item in found.items]


def done(project: Any) -> Any:
    """A completed run with one checkpoint and one attempt."""
    run = project.queue()
    checkpoint(run, 10)
    run.dir.attempt(1).mkdir()
    end(run, "completed")
    return run


def test_completed_run_is_read_once(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    run = done(project)
    first = plan(project, run, whole_runs=True)
    assert [(item.path, item.bytes > 1000) for item in first.items] == [(run.path, True)]
    monkeypatch.setattr(clean, "read_facts", lambda run: pytest.fail("read"))
    monkeypatch.setattr(clean, "statuses", lambda runs, slurm=None: [] if not runs else pytest.fail("asked"))
    assert plan(project, run, whole_runs=True) == first


@pytest.mark.parametrize("how", ["pinned", "resumed", "went on", "a new file", "a longer metrics file"])
def test_change_to_a_completed_run_is_noticed(project: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    run = done(project)
    first = plan(project, run, whole_runs=True)
    assert names(first) == [run.run_id]
    if how == "pinned":
        pin(run.dir.checkpoints / checkpoint_files.checkpoint_name(10), why="a test")
    elif how == "resumed":
        record = run.record
        write_record(run.dir, replace(record, job_ids=[*record.job_ids, "777"], ledger_offset=10**6))
    elif how == "went on":
        append_line(run.dir.ledger, {"event": "start", "attempt": 2, "time": time.time(), "job_id": "9", "nodes": ["n"],
                                     "ranks": 1})  # fmt: skip
    elif how == "a new file":
        (run.dir.attempt(1) / "core").write_bytes(b"x" * 12345)
    else:
        append_line(run.dir.metrics, {"step": 1, "attempt": 1, "time": time.time(), "values": {"loss": 1.0}})
    now = plan(project, run, whole_runs=True)
    if how in ("pinned", "resumed", "went on"):
        assert names(now) == []
    else:
        assert now.bytes > first.bytes


def test_newest_good_and_pinned_checkpoints_are_kept(project: Any) -> None:
    run = project.queue()
    for step in (10, 20, 30):
        checkpoint(run, step)
    pin(checkpoint(run, 5), why="a test")
    checkpoint(run, 40, damaged=True)
    (run.dir.checkpoints / checkpoint_files.temporary_name(50, 1)).mkdir()
    end(run, "failed")
    found = plan(project, run)
    assert names(found) == ["step_00000040", "step_00000020", "step_00000010", ".step_00000050.1.tmp"]
    for item in found.items:
        delete(item, slurm=project.slurm)
    assert sorted(path.name for path in run.dir.checkpoints.iterdir()) == ["step_00000005", "step_00000030"]


def test_run_that_may_still_be_active_is_kept(project: Any) -> None:
    run = project.queue()
    checkpoint(run, 10)
    checkpoint(run, 20)
    assert plan(project, run, whole_runs=True).items == ()
    project.slurm.unreachable = "no answer"
    assert plan(project, run, whole_runs=True).items == ()


def test_recent_runs_are_kept(project: Any) -> None:
    run = project.queue()
    checkpoint(run, 10)
    checkpoint(run, 20)
    end(run, "completed")
    assert plan(project, run, age=60).items == ()
    assert names(plan(project, run)) == ["step_00000010"]


def test_whole_run_is_deleted_only_if_completed_or_empty(project: Any) -> None:
    done, failed, empty, pinned = (project.queue() for _ in range(4))
    checkpoint(done, 10)
    checkpoint(failed, 10)
    pin(checkpoint(pinned, 10), why="a test")
    for run, reason in ((done, "completed"), (failed, "failed"), (empty, "failed"), (pinned, "completed")):
        end(run, reason)
    found = plan(project, done, failed, empty, pinned, whole_runs=True)
    assert {item.run_id for item in found.items} == {done.run_id, empty.run_id}
    for item in found.items:
        delete(item, slurm=project.slurm)
    assert [run.path.exists() for run in (done, failed, empty, pinned)] == [False, True, False, True]


def test_checkpoint_of_a_run_active_again_is_not_deleted(project: Any) -> None:
    run = project.queue()
    checkpoint(run, 10)
    checkpoint(run, 20)
    project.slurm.move(run.job_id, JobState.CANCELLED)
    (item,) = plan(project, run).items
    project.slurm.move(run.job_id, JobState.RUNNING)
    with pytest.raises(RunDirectoryError, match="was not deleted"):
        delete(item, slurm=project.slurm)
    assert item.path.exists()


def test_run_pinned_after_the_plan_is_not_deleted(project: Any) -> None:
    runs = [project.queue() for _ in range(2)]
    for run in runs:
        checkpoint(run, 10)
        end(run, "completed")
    first, second = plan(project, *runs, whole_runs=True).items
    pin(first.path / "checkpoints" / checkpoint_files.checkpoint_name(10), why="a test")
    with pytest.raises(RunDirectoryError, match="step_00000010 has since been pinned"):
        delete(first, slurm=project.slurm)
    delete(second, slurm=project.slurm)
    assert [item.path.exists() for item in (first, second)] == [True, False]


def test_pin_made_during_the_deletion_is_respected(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project.queue()
    path = checkpoint(run, 10)
    end(run, "completed")
    (item,) = plan(project, run, whole_runs=True).items
    rename = os.rename

    def pinned_just_before(source: Any, target: Any) -> None:
        if source == item.path:
            pin(path, why="a test")
        rename(source, target)

    monkeypatch.setattr(os, "rename", pinned_just_before)
    with pytest.raises(RunDirectoryError, match="was pinned or its run was resumed in the meantime"):
        delete(item, slurm=project.slurm)
    assert (path / checkpoint_files.PINNED).exists()


def test_checkpoint_that_another_run_will_start_from_is_kept(project: Any) -> None:
    run = project.queue()
    old, _ = checkpoint(run, 10), checkpoint(run, 20)
    end(run, "completed")
    (item,) = plan(project, run).items
    (whole,) = plan(project, run, whole_runs=True).items
    other = project.queue(f"checkpoint.resume={old}")
    for one in (item, whole):
        with pytest.raises(RunDirectoryError, match=f"run {other.run_id} will start from it"):
            delete(one, slurm=project.slurm)
    assert plan(project, run, whole_runs=True).items == ()
    end(other, "completed")
    assert names(plan(project, run)) == [old.name]


def test_origins_are_cached_across_deletions_and_refreshed(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project.queue()
    for step in (10, 20, 30, 40):
        checkpoint(run, step)
    end(run, "completed")
    first, second, third = plan(project, run).items
    clock, readings, read = [100.0], list[float](), deletable.origins

    def reading() -> dict[Path, str]:
        readings.append(clock[0])
        clock[0] += 3.0
        return read()

    monkeypatch.setattr(deletable, "origins", reading)
    origins = Origins(now=lambda: clock[0])
    delete(first, slurm=project.slurm, origins=origins)
    other = project.queue(f"checkpoint.resume={third.path}")
    clock[0] += 2.0
    delete(second, slurm=project.slurm, origins=origins)
    assert readings == [100.0], "no more than half of the time goes into it"
    clock[0] += 1.0
    with pytest.raises(RunDirectoryError, match=f"run {other.run_id} will start from it"):
        delete(third, slurm=project.slurm, origins=origins)
    assert readings == [100.0, 106.0]


def test_planned_checkpoint_is_kept_if_a_newer_one_was_lost(project: Any) -> None:
    run = project.queue()
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    end(run, "failed")
    (item,) = plan(project, run).items
    (newest / checkpoint_files.MANIFEST).unlink()
    with pytest.raises(RunDirectoryError, match="has changed since the plan was made"):
        delete(item, slurm=project.slurm)


def test_size_of_a_folder_skips_unreadable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "open" / "file").write_bytes(b"1234")
    scandir = os.scandir

    def closed(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert clean._size(tmp_path) == 4


def test_size_has_a_file_with_several_names_once_and_only_if_all_names_are_deleted(tmp_path: Path) -> None:
    first, second = tmp_path / "run" / "1", tmp_path / "run" / "2"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "own").write_bytes(b"1234")
    (first / "shared").write_bytes(b"123456789")
    (second / "shared").hardlink_to(first / "shared")
    assert [clean._size(path) for path in (first, second, tmp_path / "run")] == [4, 4, 17]
