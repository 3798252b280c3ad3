from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import append_line, atomic_write, fsync_directory, read_json, read_lines
from hpcaccel.core.records import AttemptEnd, from_dict, to_dict
from hpcaccel.core.registered_runs import index_lines, register
from hpcaccel.core.run_dir import RunDir, default_runs_dir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError, UserError


def test_torn_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2')
    assert [line["n"] for line, _ in read_lines(path)] == [1]
    append_line(path, {"n": 3})
    assert [line["n"] for line, _ in read_lines(path)] == [1, 3]


def test_read_lines_continues_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"text": "ü\n"})
    [(line, offset)] = read_lines(path)
    assert line == {"text": "ü\n"}
    append_line(path, {"n": 2})
    assert [line for line, _ in read_lines(path, offset=offset)] == [{"n": 2}]


def test_failed_atomic_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    atomic_write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_json_file_without_an_object_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) is None
    path.write_text("[]")
    with pytest.raises(RunDirectoryError, match="does not contain a JSON object"):
        read_json(path)
    for damaged in (b"{", b'{"text": "\xff"}'):
        path.write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match="not valid JSON"):
            read_json(path)


def test_existing_run_directory_is_not_created_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt" / "20261120-153012-4f2a")
    run.create()
    assert run.path.stat().st_mode & 0o777 == 0o750
    with pytest.raises(RunDirectoryError, match="File exists"):
        run.create()


def test_array_tasks_are_named_as_slurm_names_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "20261120-153012-4f2a")
    assert run.task(3).run_id == "20261120-153012-4f2a_3"


def test_index_lists_registered_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    register(RunDir(tmp_path / "a"), name="gpt", job_id="7")
    [line] = index_lines()
    assert line == {"run_id": "a", "name": "gpt", "job_id": "7", "path": str(tmp_path / "a")}


def test_unknown_fields_of_records_are_ignored() -> None:
    line = AttemptEnd(attempt=1, time=0.5, reason="completed", decision="end")
    assert from_dict(AttemptEnd, {**to_dict(line), "added_later": 1}) == line


def test_only_directories_with_a_manifest_are_checkpoints(tmp_path: Path) -> None:
    assert checkpoint_files.newest(tmp_path / "none") is None
    for step, content in ((5, "{}"), (20, "{}"), (30, "{torn"), (40, None)):
        folder = tmp_path / checkpoint_files.checkpoint_name(step)
        folder.mkdir()
        if content is not None:
            (folder / checkpoint_files.MANIFEST).write_text(content)
    (tmp_path / checkpoint_files.temporary_name(50, 1)).mkdir()
    assert [checkpoint.step for checkpoint in checkpoint_files.committed(tmp_path)] == [5, 20]
    newest = checkpoint_files.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step_00000020"


def test_a_trial_runs_the_code_of_its_sweep(tmp_path: Path) -> None:
    sweep = SweepDir(tmp_path / "gpt" / "20261120-153012-4f2a")
    sweep.create()
    trial = sweep.trial(7)
    trial.create()
    assert (trial.code, trial.node_program) == (sweep.code, sweep.node_program)
    assert trial.run_id == "20261120-153012-4f2a_7"
    worker = sweep.worker(0)
    worker.prepare()
    assert worker.sweep.path == sweep.path
    assert (sweep.trial_numbers(), sweep.worker_indices()) == ([7], [0])


@pytest.mark.parametrize(("number", "passes"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_fsync_of_a_directory_ignores_einval_but_not_io_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, passes: bool
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with nullcontext() if passes else pytest.raises(OSError, match="Input/output"):
        fsync_directory(tmp_path)


def test_deleted_current_directory_is_an_error_for_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for relative in (default_runs_dir, lambda: RunDir("runs/x")):
        with pytest.raises(UserError, match="the current directory no longer exists"):
            relative()
    assert RunDir(tmp_path / "x").path == tmp_path / "x"
