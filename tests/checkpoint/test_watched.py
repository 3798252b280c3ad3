"""Checkpoints of other programs: only complete ones count, and the newest is the one that was completed last."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.checkpoint_files.watched import newest_saved, watched
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchSpec, LaunchWatch
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.spec.job.watch_fields import WatchSection


def make_run(folder: Path, **watch: Any) -> RunDir:
    run = RunDir(folder / "run")
    run.create()
    pattern = WatchSection(**watch).pattern({})
    place = pattern.glob if pattern.glob.startswith("{run_dir}") else f"{folder}/{pattern.glob}"
    launch = LaunchSpec(
        kind="program", program=["x"], workdir=str(folder), backend="local", nodes=1, ranks_per_node=1, stop="signals",
        watch=LaunchWatch(glob=place, complete=pattern.complete, step=pattern.step),
    )  # fmt: skip
    write_json(run.spec, {"version": 1, "spec": {}, "launch": launch.to_dict()})
    return run


def make(path: Path, *files: str, at: float | None = None) -> Path:
    """A checkpoint directory with ``files``, all of them written at ``at``."""
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("x")
        if at is not None:
            os.utime(path / name, (at, at))
    return path


def archive() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as written:
        written.writestr("data.pkl", b"x" * 100)
    return memory.getvalue()


@pytest.mark.parametrize(
    ("preset", "name", "mark", "step"),
    [
        ("transformers", "out/checkpoint-40", "trainer_state.json", 40),
        ("torchtitan", "out/checkpoint/step-40", ".metadata", 40),
        ("dcp", "out/epoch2_40", ".metadata", 40),
        ("lightning", "out/a/epoch=1-step=40.ckpt", "meta.pt", 40),
        ("lightning", "out/hpc_ckpt_40.ckpt", "meta.pt", 40),
    ],
)
def test_directory_of_a_preset_counts_once_its_last_file_exists(
    tmp_path: Path, preset: str, name: str, mark: str, step: int
) -> None:
    run = make_run(tmp_path, preset=preset, directory="out")
    assert newest_saved(run) is None
    path = make(tmp_path / name, "model.safetensors")
    assert newest_saved(run) is None
    assert [(one.step, one.complete) for one in watched(run)] == [(step, False)]
    (path / mark).write_text("x")
    newest = newest_saved(run)
    assert newest is not None
    assert (newest.path, newest.step) == (path, step)


def test_megatrons_iteration_counts_once_the_tracker_names_it_or_a_later_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, preset="megatron", directory="out")
    for step in (100, 200, 300):
        make(tmp_path / f"out/iter_{step:07d}", "x.distcp")
    assert newest_saved(run) is None
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("200")
    assert {one.step: one.complete for one in watched(run)} == {100: True, 200: True, 300: False}


def test_empty_tracker_leaves_only_the_last_iteration_incomplete(tmp_path: Path) -> None:
    """A program that is killed while it rewrites the tracker leaves it empty."""
    run = make_run(tmp_path, preset="megatron", directory="out")
    for step in (100, 200, 300):
        make(tmp_path / f"out/iter_{step:07d}", "x.distcp")
    tracker = tmp_path / "out" / "latest_checkpointed_iteration.txt"
    for text in ("", "\n"):
        tracker.write_text(text)
        assert {one.step: one.complete for one in watched(run)} == {100: True, 200: True, 300: False}
    tracker.write_text("release")
    assert newest_saved(run) is None


def test_file_of_torch_save_counts_once_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path, glob="{run_dir}/epoch_*.pt")
    whole = archive()
    (run.path / "epoch_3.pt").write_bytes(whole)
    (run.path / "epoch_4.pt").write_bytes(whole[: len(whole) // 2])
    (run.path / "epoch_5.pt").touch()
    assert {one.step: one.complete for one in watched(run)} == {3: True, 4: False, 5: False}


def test_newest_is_the_one_that_was_completed_last(tmp_path: Path) -> None:
    run = make_run(tmp_path, preset="transformers", directory="out")
    make(tmp_path / "out/checkpoint-900", "trainer_state.json", at=1_000.0)
    newer = make(tmp_path / "out/checkpoint-100", "trainer_state.json", at=2_000.0)
    make(tmp_path / "out/checkpoint-200", "optimizer.pt", at=3_000.0)
    newest = newest_saved(run)
    assert newest is not None
    assert newest.path == newer


def test_checkpoint_from_before_the_run_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, preset="transformers", directory="out")
    write_json(run.record, {"created": 2_000.0})
    make(tmp_path / "out/checkpoint-900", "trainer_state.json", at=1_000.0)
    assert newest_saved(run) is None
    own = make(tmp_path / "out/checkpoint-100", "trainer_state.json", at=3_000.0)
    newest = newest_saved(run)
    assert newest is not None
    assert newest.path == own


@pytest.mark.parametrize("complete", ["**x", "a/../../..", "["])
def test_unusable_pattern_finds_nothing(tmp_path: Path, complete: str) -> None:
    run = make_run(tmp_path, glob="out/*-*", complete=complete)
    make(tmp_path / "out" / "x-7", "done")
    assert newest_saved(run) is None


def test_directory_with_signs_of_patterns_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, preset="transformers", directory="out[lr=1]")
    path = make(tmp_path / "out[lr=1]" / "checkpoint-7", "trainer_state.json")
    newest = newest_saved(run)
    assert newest is not None
    assert newest.path == path


def test_pattern_does_not_interpret_the_run_directorys_own_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a[b]*", glob="{run_dir}/out/*-*", complete="done")
    make(run.path / "out" / "x-7", "done")
    assert [one.step for one in watched(run)] == [7]


def test_checkpoint_named_at_a_stop_counts_while_it_exists(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    saved = tmp_path / "mine.pt"
    line = AttemptEnd(
        attempt=1, time=1.0, reason="preempted", decision="requeue", checkpoint=str(saved), checkpoint_step=30
    )
    assert newest_saved(run, [line]) is None
    saved.touch()
    newest = newest_saved(run, [line])
    assert newest is not None
    assert (newest.name, newest.step) == (str(saved), 30)
