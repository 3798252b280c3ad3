"""Tests of data staged on a node's own disk: copied before the ranks start, removed after them, never partial."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.checkpoint_files import snapshot_folder
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.core.launch_spec import LaunchStage
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.environment.staging import NoRoom, bring, problem_in, stage_directory

from .conftest import LocalRun

Make = Callable[..., LocalRun]
LISTS = """
import os
place = os.environ["HPCACCEL_STAGE_DIR"]
print("staged", place, sorted(os.listdir(place + "/data")), open(place + "/data/sub/b").read())
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a" * 1000)
    (folder / "sub/b").write_text("b")
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    place = tmp_path / "disk"
    place.mkdir()
    return place


def launch(data: Path, **stage: Any) -> dict[str, Any]:
    return {"stage": {"sources": [str(data)], "directory": "$FAST", **stage}}


@pytest.mark.parametrize("keep", [False, True])
def test_ranks_find_staged_data_and_it_is_removed_unless_kept(
    local_run: Make, data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setenv("FAST", str(disk))
    run = local_run(LISTS, launch=launch(data, keep=keep))
    assert run.run() == 0, run.log
    assert f"staged {disk}/hpcaccel-stage-{os.getuid()}-" in run.dir.rank_log(1, 0).read_text()
    assert "['a', 'sub'] b" in run.dir.rank_log(1, 0).read_text()
    assert bool(list(disk.iterdir())) == keep


def test_missing_source_ends_the_run_with_a_setup_error(
    local_run: Make, data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAST", str(disk))
    run = local_run(LISTS, launch=launch(data / "gone"))
    assert run.run() == 1
    [end] = run.lines("end")
    assert (end["decision"], end["error_class"]) == ("end", "setup")
    assert f"{data}/gone: No such file or directory" in end["detail"]
    assert not run.dir.rank_log(1, 0).exists()
    assert not list(disk.iterdir())


def test_unchanged_files_are_not_copied_again(data: Path, disk: Path) -> None:
    assert bring(data, disk) == 1001
    assert bring(data, disk) == 0
    (data / "sub/b").write_text("other")
    (data / "a").unlink()
    assert bring(data, disk) == 5
    assert (disk / "data/sub/b").read_text() == "other"
    assert not (disk / "data/a").exists()


def test_interrupted_copy_continues_if_the_source_is_unchanged(data: Path, disk: Path) -> None:
    given = (data / "a").stat()
    (disk / "data").mkdir()
    part = disk / "data" / f".a.{given.st_size}.{given.st_mtime_ns}.part"
    part.write_text("a" * 600)
    stale = disk / "data" / ".a.7.7.part"
    stale.write_text("of an older one")
    assert bring(data, disk) == 401
    assert (disk / "data/a").read_text() == "a" * 1000
    assert not part.exists()
    assert not stale.exists()


def test_staging_to_a_disk_that_is_too_small_raises_no_room(
    data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500))
    with pytest.raises(NoRoom, match=r"stage: .*/data needs .* GB more on .* has 0.00 GB free. Stage less, set"):
        bring(data, disk)
    assert not (disk / "data/a").exists()


def test_stage_directory_depends_on_job_variables_and_settings() -> None:
    job = {"SLURM_JOB_ID": "46"}
    own = f"hpcaccel-stage-{os.getuid()}-46"
    assert stage_directory(LaunchStage(sources=["/d"]), {**job, "TMPDIR": "/t", "SLURM_TMPDIR": "/s"}) == Path(
        "/s", own
    )
    assert stage_directory(LaunchStage(sources=["/d"]), {**job, "TMPDIR": "/t"}) == Path("/t", own)
    assert stage_directory(LaunchStage(sources=["/d"], directory="/x/$USER"), {**job, "USER": "ann"}) == Path(
        "/x/ann", own
    )
    kept = LaunchStage(sources=["/d"], keep=True)
    assert stage_directory(kept, {"SLURM_JOB_ID": "1"}) == stage_directory(kept, {"SLURM_JOB_ID": "2"})
    with pytest.raises(RankEnvironmentError, match=r"\$SCRATCH is not set in this job"):
        stage_directory(LaunchStage(sources=["/d"], directory="$SCRATCH"), job)


def test_nodes_with_the_same_problem_are_named_together() -> None:
    lines = ["welcome", '{"node": "n2", "problem": "full"}', '{"node": "n1", "problem": "full"}', '{"node": "n3"}']
    assert problem_in(lines) == ("n[1-2]: full", ["n2", "n1"])


@pytest.mark.parametrize("snapshots", [True, False])
def test_snapshots_of_a_failed_run_are_removed_from_memory(local_run: Make, snapshots: bool) -> None:
    run = local_run("raise SystemExit(3)", launch={"snapshots": snapshots}, restart_in_place=0, max_failures=0)
    folder = SnapshotFolder(run.dir.path, "n1")
    folder.close()
    try:
        assert run.run() == 1, run.log
        assert folder.run.exists() != snapshots, run.log
    finally:
        snapshot_folder.remove(run.dir.path)
