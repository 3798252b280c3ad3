"""Lightning's Trainer with ``HpcaccelCallback``: one agreed step, a checkpoint in time, and the run's own ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.integrations.checks import check_exact_resume
from tests.runtime.ranks import make_run, metrics, outcome, request_stop, run_ranks

pytest.importorskip("lightning")
pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).parent / "programs" / "train_lightning.py")
PRELOAD = ("lightning.pytorch",)


@pytest.fixture(autouse=True)
def torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hpcaccel's launcher sets it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run.1")


def train(run: RunDir, *arguments: str, attempt: int = 1, size: int = 2) -> Any:
    words = ("--root", str(run.path / "out"), *arguments)
    return run_ranks(PROGRAM, words, size=size, run=run, attempt=attempt, blocked=True, preload=PRELOAD)


def test_stopped_trainer_saves_at_one_step_and_continues(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run)
    stopped = train(run, "--kill", "1:7", "--workers", "1", "--accumulate", "2", "--steps", "20")
    assert stopped.codes == [85, 85], stopped.outputs
    found = outcome(run) or {}
    step = found["step"]
    assert 7 <= step <= 9
    assert (found["reason"], found["resume"]) == ("preempted", True)
    assert found["checkpoint"] == str(run.path / "out" / f"hpcaccel-step={step}.ckpt")
    resumed = train(run, "--accumulate", "2", "--steps", "20", attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == {"step": 20}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"]) == (step, found["checkpoint"])
    assert progress["total_steps"] == 20
    assert set(metrics(run)) == set(range(1, 21))


@pytest.mark.parametrize(("workers", "kill"), [(0, 17), (1, 40), (0, 30)])
def test_with_exact_data_the_losses_after_a_resume_are_those_of_an_undisturbed_run(
    tmp_path: Path, workers: int, kill: int
) -> None:
    """The dataset draws random numbers, the model has dropout, and the epochs have 30 steps on each rank."""
    options = ("--exact", "--workers", str(workers), "--steps", "70")
    losses = check_exact_resume(train, tmp_path, options, kill=kill)
    assert set(losses) == set(range(1, 71))


def test_newest_checkpoint_is_the_one_completed_last_and_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = train(run, "--steps", "12", "--save_steps", "5", size=1)
    assert first.codes == [0], first.outputs
    (run.path / "out" / "hpc_ckpt_9.ckpt").write_bytes(b"PK\x03\x04 torn")
    second = train(run, "--steps", "14", attempt=2, size=1)
    assert second.codes == [0], second.outputs
    progress = read_json(run.progress(2)) or {}
    assert progress["resumed_step"] == 10
    assert Path(progress["resumed_from"]).name == "epoch=0-step=10.ckpt"


def test_pruned_trial_ends_without_a_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="pruned", then="finish")
    ended = train(run, "--kill", "1:5")
    assert ended.codes == [0, 0], ended.outputs
    assert not list(run.path.glob("out/*.ckpt"))


def test_trainer_that_would_train_a_copy_on_each_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    ended = train(make_run(tmp_path / "run"), "--devices", "1")
    assert 0 not in ended.codes
    assert any("but the run has 2" in output or "devices" in output for output in ended.outputs), ended.outputs
