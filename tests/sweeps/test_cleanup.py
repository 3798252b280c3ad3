"""Cleanup after a trial: files that are removed and files that are kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import pin
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.trial_files import CheckpointCleanup, drop_checkpoints, fold


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    sweep = SweepDir(tmp_path / "20261120-153012-4f2a")
    sweep.create()
    return sweep


def trial(sweep: SweepDir, number: int, *steps: int) -> RunDir:
    run = sweep.trial(number)
    run.create()
    for step in steps:
        path = run.checkpoints / checkpoint_files.checkpoint_name(step)
        path.mkdir()
        (path / "0.bin").write_bytes(b"x" * 100)
        write_json(path / checkpoint_files.MANIFEST, {"version": 1, "step": step})
    return run


def steps(run: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoint_files.committed(run.checkpoints)]


def test_pruned_trial_keeps_no_complete_or_partial_checkpoint(sweep: SweepDir) -> None:
    run = trial(sweep, 0, 10, 20)
    (run.checkpoints / checkpoint_files.temporary_name(30, 1)).mkdir()
    CheckpointCleanup(sweep, keep=5).after_pruned(0)
    assert list(run.checkpoints.iterdir()) == []


def test_pinned_checkpoint_is_kept(sweep: SweepDir) -> None:
    run = trial(sweep, 0, 10, 20)
    pin(run.checkpoints / checkpoint_files.checkpoint_name(10), why="somebody branches from it")
    assert drop_checkpoints(run) == 1
    assert steps(run) == [10]


def test_best_finished_trials_keep_their_checkpoints(sweep: SweepDir) -> None:
    runs = [trial(sweep, number, 10) for number in range(4)]
    CheckpointCleanup(sweep, keep=2).after_finished(3, best_first=[3, 0, 2, 1])
    assert [steps(run) for run in runs] == [[10], [], [], [10]]
    CheckpointCleanup(sweep, keep=None).after_finished(3, best_first=[0, 3])
    assert steps(runs[3]) == [10]


def test_failed_trial_keeps_its_newest_checkpoint_and_stacks(sweep: SweepDir) -> None:
    run = trial(sweep, 0, 10, 20)
    (run.attempt(1) / "stacks").mkdir(parents=True)
    CheckpointCleanup(sweep, keep=0).after_interrupted(0)
    assert steps(run) == [20]
    assert (run.attempt(1) / "stacks").is_dir()


def test_concurrent_cleanups_remove_each_checkpoint_once(sweep: SweepDir) -> None:
    run = trial(sweep, 0, *range(10, 60))
    gone: list[int] = []
    workers = [threading.Thread(target=lambda: gone.append(drop_checkpoints(run))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(gone) == 50
    assert drop_checkpoints(run) == 0
    assert list(run.checkpoints.iterdir()) == []


def test_only_logs_of_the_last_attempt_are_kept(sweep: SweepDir) -> None:
    run = trial(sweep, 0)
    append_line(run.ledger, {"event": "start", "attempt": 1})
    append_line(run.metrics, {"step": 1, "attempt": 1, "time": 1.0, "values": {"loss": 2.0}})
    for attempt in (1, 2):
        (run.heartbeats(attempt)).mkdir(parents=True)
        (run.heartbeats(attempt) / "0.json").write_text("{}")
        run.rank_log(attempt, 0).write_text("step 1\n")
    fold(run)
    assert [path.name for path in run.attempts.iterdir()] == ["2"]
    assert [path.name for path in run.attempt(2).iterdir()] == ["0.log"]
    assert run.ledger.exists()
    assert [line.values for line in Logged(run).read()] == [{"loss": 2.0}]


def test_foreign_metrics_of_earlier_attempts_are_kept(sweep: SweepDir) -> None:
    run = trial(sweep, 0)
    for attempt in (1, 2):
        run.attempt(attempt).mkdir()
        run.rank_log(attempt, 0).write_text("")
        append_line(run.foreign_metrics(attempt), {"step": attempt, "loss": 1.0 / attempt})
    fold(run)
    assert not run.rank_log(1, 0).exists()
    assert [line.values for line in Logged(run).read()] == [{"loss": 1.0}, {"loss": 0.5}]
