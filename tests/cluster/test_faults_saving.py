"""Faults during a save: the run resumes from the last committed checkpoint."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcaccel import checkpoint_files

from .dev_cluster import Cluster, wait_until
from .injectors import injected, kill_inside_a_save, signal_rank
from .scenario import Scenario

pytestmark = pytest.mark.chaos

Lease = Callable[[int], list[str]]
Exact = Callable[..., None]
EVER = {"max_failures": 100, "restart_in_place": 100}

POINTS = [
    # rank 0: directories and files of its own, index, manifest, commit, and deletion of old checkpoints
    [(0, "mkdir", 1), (0, "mkdir", 2), (0, "fsync", 1), (0, "fsync", 2), (0, "fsync", 3)],
    [(0, "rename", 1), (0, "fsync", 4), (0, "rename", 2), (0, "fsync", 5), (0, "rename", 3)],
    [(0, "fsync", 6), (0, "rename", 4), (0, "rmdir", 1), (0, "rename", 5), (0, "fsync", 8)],
    [(1, "fsync", 1), (2, "fsync", 1), (3, "fsync", 1), (3, "fsync", 2), (1, "fsync", 2)],
]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


@pytest.mark.parametrize("points", POINTS, ids=["begin", "commit", "after", "others"])
def test_rank_killed_during_a_save_leaves_only_complete_checkpoints(
    scenario: Scenario, assert_exact: Exact, points: list[tuple[int, str, int]]
) -> None:
    scenario.train("--pause", "0.2", "--always", checkpoint={"every_steps": 2}, resilience=EVER)
    saved = 0
    for number, point in enumerate(points):
        saved = scenario.wait_for_checkpoint(after=saved)
        scenario.wait_for_step(saved, attempt=number + 1)
        kill_inside_a_save(scenario, *point)
        scenario.wait_for_ends(number + 1)
        saved = max(item.step for item in checkpoint_files.committed(scenario.dir.checkpoints))
        assert all(path.name.startswith((".step", "step")) for path in scenario.dir.checkpoints.iterdir())
        for checkpoint in checkpoint_files.committed(scenario.dir.checkpoints):
            assert set(checkpoint.manifest["files"]) < {path.name for path in checkpoint.path.iterdir()}
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart")] * len(points) + [("completed", "end")], scenario.story
    assert_exact(scenario)


def test_ten_crashes_with_keep_one_always_leave_a_checkpoint(scenario: Scenario, assert_exact: Exact) -> None:
    dice = random.Random(0)
    sections = {"checkpoint": {"every_steps": 2, "keep": 1}, "slurm": {"time": 60}, "resilience": EVER}
    scenario.train("--pause", "0.2", "--always", **sections)
    saved = 0
    for number in range(10):
        saved = scenario.wait_for_checkpoint(after=saved)
        assert len(checkpoint_files.committed(scenario.dir.checkpoints)) in (1, 2)  # never none, not even for a moment
        scenario.wait_for_step(saved, attempt=number + 1)
        signal_rank(scenario, dice.randrange(4))
        scenario.wait_for_ends(number + 1)
        saved = max(item.step for item in checkpoint_files.committed(scenario.dir.checkpoints))
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart")] * 10 + [("completed", "end")], scenario.story
    assert_exact(scenario)


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_disk_error_on_one_rank_fails_the_attempt_and_the_run_resumes(
    scenario: Scenario, assert_exact: Exact, error: str
) -> None:
    scenario.train("--pause", "0.2", checkpoint={"every_steps": 5})
    saved = scenario.wait_for_checkpoint()
    with injected(scenario, 2, f"error={error}", calls=["fsync", "fdatasync"]):
        scenario.wait_for_ends(1)
    words = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}[error]
    first = scenario.lines("end")[0]
    assert words in first["detail"], scenario.story
    assert "rank 2" in first["detail"]
    assert first["checkpoint_step"] == saved
    assert scenario.wait_until_over() == 0, scenario.story
    assert_exact(scenario)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a small file system in ``path``; yields a function that enlarges it."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)

    def enlarge(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)

    try:
        yield enlarge
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_run_on_a_full_disk_waits_for_space_and_continues(scenario: Scenario, assert_exact: Exact) -> None:
    scenario.train("--pause", "0.2", "--start-pause", "3", checkpoint={"every_steps": 5, "keep": None})
    with small_disk(scenario.dir.checkpoints, "300k") as enlarge:
        scenario.wait_for_ends(1)
        first = scenario.lines("end")[0]
        assert (first["error_class"], first["nodes_blamed"]) == ("disk_full", []), scenario.story
        assert "No space left on device; it needs " in first["detail"]
        good = checkpoint_files.newest(scenario.dir.checkpoints)
        assert good is not None
        waits = scenario.dir.supervisor_log(2)
        wait_until(
            lambda: waits.exists() and "Waiting for up to 10 minutes" in waits.read_text(), "the ranks wait for room"
        )
        enlarge("100m")
        assert scenario.wait_until_over() == 0, scenario.story
        assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
        assert scenario.lines("end")[-1]["resumed_step"] == good.step
        assert_exact(scenario)


def test_run_waits_until_checkpoints_are_writable_again(scenario: Scenario, assert_exact: Exact) -> None:
    scenario.train("--pause", "0.2", checkpoint={"every_steps": 5})
    saved = scenario.wait_for_checkpoint()
    subprocess.run(["chattr", "+i", str(scenario.dir.checkpoints)], check=True)
    try:
        scenario.wait_for_ends(1)
        first = scenario.lines("end")[0]
        assert (first["error_class"], first["nodes_blamed"]) == ("unwritable", []), scenario.story
        waits = scenario.dir.supervisor_log(2)
        wait_until(lambda: waits.exists() and "Waiting for up to 10 minutes" in waits.read_text(), "the ranks wait")
    finally:
        subprocess.run(["chattr", "-i", str(scenario.dir.checkpoints)], check=True)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    assert scenario.lines("end")[-1]["resumed_step"] >= saved
    assert_exact(scenario)


def test_run_fails_if_its_directory_is_moved_and_can_be_resumed(cluster: Cluster, scenario: Scenario) -> None:
    scenario.train("--pause", "0.2", checkpoint={"every_steps": 5})
    scenario.wait_for_checkpoint()
    moved = scenario.folder / "moved"
    scenario.dir.path.rename(moved)
    assert cluster.wait_for(scenario.job_id, ["FAILED"])["ExitCode"] == "2:0"
    assert not scenario.dir.path.exists()
    assert (
        f"the run directory no longer exists (was it moved or deleted?): {scenario.dir.path}"
        in (moved / "slurm.log").read_text()
    )
    moved.rename(scenario.dir.path)
    scenario.cli("resume", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story


def test_second_sigterm_during_the_last_save_is_ignored(
    cluster: Cluster, scenario: Scenario, assert_exact: Exact
) -> None:
    scenario.train("--pause", "0.25", "--save-pause", "3")
    scenario.wait_for_step(8)
    cluster.run("scancel", "--signal=TERM", scenario.step)
    scenario.wait_for_word("saving", rank=1)
    cluster.run("scancel", "--signal=TERM", scenario.step)
    signal_rank(scenario, 3, signal.SIGUSR2)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert_exact(scenario)


def test_save_longer_than_kill_wait_falls_back_to_the_previous_one(scenario: Scenario, assert_exact: Exact) -> None:
    """The last save is killed half-way after KillWait (10 s); the one before it counts."""
    scenario.train("--pause", "0.25", "--save-pause", "15", slurm={"partition": "gpu0"}, checkpoint={"every_steps": 5})
    saved = scenario.wait_for_checkpoint()
    scenario.wait_for_step(saved + 3)
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    assert scenario.lines("end")[1]["resumed_step"] == saved
    assert not list(scenario.dir.checkpoints.glob(".step_*")), "what the killed save left is gone"
    assert_exact(scenario)
