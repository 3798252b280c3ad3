"""Finding a run by ID, name, job ID or path, and the cache of known runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir, state_home
from hpcaccel.errors import RunNotFound
from hpcaccel.submission import Run, RunArray, all_runs, find_run
from hpcaccel.submission.jobs.run_state import read_record, write_record
from hpcaccel.submission.runs import find, run_index
from hpcaccel.submission.runs.find import KnownRuns, known_runs
from tests.submission.conftest import Project


@pytest.fixture(autouse=True)
def readable_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs readable IDs in order of submission; each pair shares a prefix."""
    numbers = iter(range(100))

    def new_run_id() -> str:
        number = next(numbers)
        return f"20260101-0000{number // 2:02}-a{number % 2}00"

    monkeypatch.setattr("hpcaccel.submission.submit.request.new_run_id", new_run_id)


def test_run_is_found_by_id_name_job_id_and_path(project: Project) -> None:
    run = project.queue()
    other = project.queue(name="other")
    latest = project.queue()
    assert isinstance(run, Run)
    for token, expected in [
        (run.run_id, run),
        ("demo", latest),
        ("other", other),
        (run.job_id, run),
        (other.job_id, other),
        (latest.run_id[:-3], latest),
        (str(run.path), run),
    ]:
        assert find_run(token).path == expected.path, token


def test_run_is_found_from_any_directory(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = project.queue()
    monkeypatch.chdir(tmp_path)
    assert find_run(run.run_id).path == run.path


def test_run_is_found_without_an_index(project: Project, home: Path) -> None:
    run = project.queue()
    shutil.rmtree(home / "state")
    assert find_run("demo").path == run.path


@pytest.mark.parametrize("index", [True, False])
def test_search_by_id_or_name_looks_only_at_the_runs_of_this_id_or_name(
    project: Project, home: Path, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    first, last, other = project.queue(), project.queue(), project.queue(name="other")
    if not index:
        shutil.rmtree(home / "state")
    read: list[str] = []
    whole = read_record

    def noted(run: RunDir) -> RunRecord:
        read.append(run.run_id)
        return whole(run)

    monkeypatch.setattr(find, "read_record", noted)
    monkeypatch.setattr(find, "known_runs", lambda runs_dir=None: pytest.fail("looked at all runs"))
    assert find_run("demo").path == last.path
    assert find_run("other").path == other.path
    assert read == [last.run_id, other.run_id]
    if index:
        assert find_run(first.run_id).path == first.path
    shutil.rmtree(last.path)
    assert find_run("demo").path == first.path


def test_ambiguous_id_prefix_lists_all_matching_runs(project: Project) -> None:
    runs = [project.queue(), project.queue()]
    with pytest.raises(RunNotFound, match="matches 2 run IDs") as refusal:
        find_run(runs[0].run_id[:-3])
    for run in runs:
        assert run.run_id in str(refusal.value)


def test_unknown_run_suggests_similar_runs(project: Project) -> None:
    with pytest.raises(RunNotFound, match="there are no runs yet"):
        find_run("demo")
    project.queue()
    with pytest.raises(RunNotFound, match=r"Similar runs:\n  2026.*demo"):
        find_run("dmeo")


def test_deleted_run_is_not_found(project: Project) -> None:
    shutil.rmtree(project.queue().path)
    with pytest.raises(RunNotFound):
        find_run("demo")


def test_damaged_record_does_not_hide_other_runs(project: Project) -> None:
    broken, whole = project.queue(), project.queue()
    RunDir(broken.path).record.write_text("{")
    assert [run.path for run in all_runs()] == [whole.path]


def test_only_sweeps_finds_a_sweep_that_shares_its_name_with_a_run(project: Project) -> None:
    sweep = project.queue()
    record = read_record(RunDir(sweep.path))
    write_record(RunDir(sweep.path), replace(record, kind="sweep", array_size=1))
    best = project.queue()
    assert best.name == sweep.name
    assert find_run(sweep.name).path == best.path
    assert find_run(sweep.name, only_sweeps=True).path == sweep.path
    assert find_run(sweep.run_id[:-4], only_sweeps=True).path == sweep.path  # a prefix of both IDs
    assert find_run(best.run_id, only_sweeps=True).path == best.path


def changed(project: Project, run: Run, how: str) -> Path | None:
    """Change the directory of a run. Returns its new path, or None if it was deleted."""
    if how == "deleted":
        shutil.rmtree(run.path)
        return None
    if how == "moved":
        return Path(shutil.move(run.path, project.runs / "demo" / "20260101-000009-beef"))
    if how == "renamed in its record":
        write_record(run.dir, replace(run.record, name="other"))
    if how == "replaced by another with the same times":
        times = os.stat(run.dir.record)
        copy = run.dir.record.read_text().replace('"demo"', '"dema"')
        run.dir.record.unlink()
        run.dir.record.write_text(copy)
        os.utime(run.dir.record, ns=(times.st_atime_ns, times.st_mtime_ns))
    return run.path


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("nothing", "demo"),
        ("deleted", None),
        ("moved", "demo"),
        ("renamed in its record", "other"),
        ("replaced by another with the same times", "dema"),
    ],
)
def test_cached_run_is_checked_against_its_directory(
    project: Project, monkeypatch: pytest.MonkeyPatch, how: str, name: str | None
) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    run = project.queue()
    assert isinstance(run, Run)
    assert [one.name for one in known_runs()] == ["demo"]
    path = changed(project, run, how)
    assert [(one.path, one.name) for one in known_runs()] == ([] if path is None else [(path, name)])


def test_cached_run_is_not_read_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    runs = [project.queue(), project.queue()]
    first = known_runs()
    monkeypatch.setattr(find, "read_record", lambda run: pytest.fail(f"{run.path} was read"))
    assert known_runs() == first
    assert [run.run_id for run in all_runs()] == [run.run_id for run in runs]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("nothing", "demo"),
        ("deleted", None),
        ("moved", "demo"),
        ("renamed in its record", "other"),
        ("replaced by another with the same times", "dema"),
    ],
)
def test_later_read_of_a_process_notices_a_changed_run(
    project: Project, monkeypatch: pytest.MonkeyPatch, how: str, name: str | None
) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    run = project.queue()
    assert isinstance(run, Run)
    known = KnownRuns()
    assert [one.name for one in known.read()] == ["demo"]
    path = changed(project, run, how)
    assert [(one.path, one.name) for one in known.read()] == ([] if path is None else [(path, name)])


def test_later_read_of_a_process_reads_only_new_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    known = KnownRuns()
    project.queue()
    (first,) = known.read()
    project.queue()
    read, real = [], read_record
    monkeypatch.setattr(find, "read_record", lambda run: read.append(run.path) or real(run))
    again, second = known.read()
    assert again is first
    assert read == [second.path]
    assert [one.run_id for one in known_runs()] == [first.run_id, second.run_id]


def test_later_read_of_a_process_follows_a_replaced_index(project: Project) -> None:
    known = KnownRuns(project.path / "nowhere")
    run, other = project.queue(), project.queue()
    assert [one.run_id for one in known.read()] == [run.run_id, other.run_id]
    index = state_home() / "hpcaccel" / "runs.jsonl"
    kept = index.read_bytes().splitlines(keepends=True)[1]
    index.unlink()
    assert known.read() == []
    index.write_bytes(kept[:10])  # a line that another process is writing
    assert known.read() == []
    index.write_bytes(kept)
    assert [one.run_id for one in known.read()] == [other.run_id]


def test_recently_changed_run_is_not_cached(project: Project) -> None:
    """A second change within one tick of the file system's clock would go unnoticed."""
    project.queue()
    known_runs()
    assert list(state_home().rglob("names.jsonl")) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]\n", b'{"path": 3}\n', b"\xff\xfe\n", b'{"version": "0.0/1"}\n'])
def test_damaged_cache_is_ignored_and_written_again(
    project: Project, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    project.queue()
    first = known_runs()
    (file,) = state_home().rglob("names.jsonl")
    whole = file.read_bytes()
    file.write_bytes(damage + whole[: len(whole) // 2])
    assert known_runs() == first
    assert known_runs() == first
    assert file.read_bytes().endswith(whole)  # the run was read and cached again


def test_cache_file_does_not_grow_without_limit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    monkeypatch.setattr(run_index, "_SPARE_LINES", 3)
    run, other = project.queue(), project.queue()
    for number in range(20):
        write_record(run.dir, replace(run.record, name=f"n{number}"))
        assert sorted(one.name for one in known_runs()) == ["demo", f"n{number}"]
    shutil.rmtree(other.path)
    (file,) = state_home().rglob("names.jsonl")
    assert len(file.read_bytes().splitlines()) <= 2 * 2 + 3


def test_runs_are_found_without_a_writable_state_directory(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)
    project.queue()
    (project.path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(project.path / "file"))
    assert [one.name for one in known_runs()] == ["demo"]


def test_array_task_is_found_by_run_id_or_job_id(project: Project) -> None:
    array = project.queue(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    assert isinstance(find_run(array.run_id), RunArray)
    assert find_run(f"{array.run_id}_1").path == array[1].path
    assert find_run(f"{array.job_id}_0").path == array[0].path
    with pytest.raises(RunNotFound):
        find_run(f"{array.run_id}_7")


def test_resumed_run_is_found_by_each_of_its_job_ids(project: Project) -> None:
    run = project.queue()
    run.stop()
    run.resume()
    assert find_run("100").path == find_run("101").path == run.path
