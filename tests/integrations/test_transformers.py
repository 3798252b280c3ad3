"""transformers' Trainer with ``HpcaccelCallback``: one agreed step, a save in time, the same losses afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.integrations.checks import check_exact_resume
from tests.runtime.ranks import make_run, metrics, outcome, request_stop, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).parent / "programs" / "train_transformers.py")
PRELOAD = ("transformers.trainer", "accelerate")


def train(run: RunDir, *arguments: str, attempt: int = 1, size: int = 2) -> Any:
    words = ("--output_dir", str(run.path / "out"), *arguments)
    return run_ranks(PROGRAM, words, size=size, run=run, attempt=attempt, blocked=True, preload=PRELOAD)


def test_stopped_trainer_saves_at_one_step_and_continues_with_the_same_losses(tmp_path: Path) -> None:
    undisturbed = make_run(tmp_path / "undisturbed")
    ended = train(undisturbed)
    assert ended.codes == [0, 0], ended.outputs
    run = make_run(tmp_path / "run")
    request_stop(run)
    stopped = train(run, "--kill", "1:17", "--workers", "1")
    assert stopped.codes == [85, 85], stopped.outputs
    found = outcome(run) or {}
    step = found["step"]
    assert 17 <= step <= 19
    assert (found["reason"], found["resume"]) == ("preempted", True)
    assert found["checkpoint"] == str(run.path / "out" / f"checkpoint-{step}")
    assert not (run.path / "out" / "final").exists(), "the code behind train() has run"
    # A checkpoint of a later step that was not written completely:
    (run.path / "out" / "checkpoint-999").mkdir()
    resumed = train(run, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == {"step": 40}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"]) == (step, found["checkpoint"])
    assert progress["total_steps"] == 40
    expected = metrics(undisturbed)
    assert list(expected) == list(range(1, 41))
    assert metrics(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("workers", "kill"), [(0, 17), (1, 21), (0, 32)])
def test_with_exact_data_the_losses_after_a_resume_are_those_of_an_undisturbed_run(
    tmp_path: Path, workers: int, kill: int
) -> None:
    """The dataset draws random numbers, and the epochs have 32 steps on each rank: 32 is the end of one."""
    options = ("--exact", "--noise", "--workers", str(workers), "--steps", "70")
    losses = check_exact_resume(train, tmp_path, options, kill=kill)
    assert list(losses) == list(range(1, 71))


def test_run_that_is_to_finish_ends_normally_and_keeps_its_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="stop", then="finish")
    ended = train(run, "--kill", "0:5", size=1)
    assert ended.codes == [0], ended.outputs
    assert 5 <= ended.result()["step"] <= 7
    assert (run.path / "out" / "final").is_dir()
    assert (outcome(run) or {})["reason"] == "completed"


def test_stop_at_the_last_step_lets_the_training_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run)
    ended = train(run, "--steps", "8", "--kill", "0:8", size=1)
    assert ended.codes == [0], ended.outputs
    assert ended.result() == {"step": 8}
    assert (outcome(run) or {})["reason"] == "completed"
    assert (run.path / "out" / "final").is_dir()


def test_pruned_trial_ends_without_a_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="pruned", then="finish")
    ended = train(run, "--kill", "1:5")
    assert ended.codes == [0, 0], ended.outputs
    assert not list((run.path / "out").glob("*"))


def test_just_in_time_checkpoints_of_transformers_are_refused(tmp_path: Path) -> None:
    ended = train(make_run(tmp_path / "run"), "--jit", size=1)
    assert ended.codes == [1]
    assert "Remove enable_jit_checkpoint" in ended.outputs[0]
