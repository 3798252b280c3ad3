"""torchtitan's Trainer with the bridge: one agreed step, a full checkpoint, and a resume that continues the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.runtime.ranks import make_run, metrics, outcome, request_stop, run_ranks

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).parent / "programs" / "train_torchtitan.py")


def train(run: RunDir, *arguments: str, attempt: int = 1, size: int = 2) -> Any:
    words = ("--dump_folder", str(run.path / "out"), *arguments)
    return run_ranks(PROGRAM, words, size=size, run=run, attempt=attempt, blocked=True)


def saved(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.glob("out/checkpoint/step-*"))


def contents(checkpoint: str) -> set[str]:
    """The first part of each name in a checkpoint, and the names of the optimizer's tensors."""
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {name.partition(".")[0] for name in names} | {name.rpartition(".")[2] for name in names}


@pytest.mark.slow
def test_stopped_trainer_saves_whole_and_continues_with_the_same_losses(tmp_path: Path) -> None:
    undisturbed = make_run(tmp_path / "undisturbed")
    ended = train(undisturbed)
    assert ended.codes == [0, 0], ended.outputs
    run = make_run(tmp_path / "run")
    request_stop(run)
    stopped = train(run, "--kill", "1:5", "--dataloader.num_workers", "1")
    assert stopped.codes == [85, 85], stopped.outputs
    found = outcome(run) or {}
    step = found["step"]
    assert 5 <= step <= 7
    assert (found["reason"], found["resume"]) == ("preempted", True)
    assert found["checkpoint"] == str(run.path / "out" / "checkpoint" / f"step-{step}")
    assert {"optimizer", "exp_avg_sq", "lr_scheduler", "dataloader", "train_state"} <= contents(found["checkpoint"])
    # A checkpoint of a later step that was not written completely:
    (run.path / "out" / "checkpoint" / "step-999").mkdir()
    resumed = train(run, "--dataloader.num_workers", "1", attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == {"step": 12}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"]) == (step, found["checkpoint"])
    assert progress["total_steps"] == 12
    expected = metrics(undisturbed)
    assert list(expected) == list(range(1, 13))
    assert len(set(expected.values())) == 12, "a loss that does not depend on the step shows nothing"
    assert metrics(run) == expected


@pytest.mark.slow
def test_torchtitan_main_is_stopped_and_resumed_with_asynchronous_saves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run)
    words = ("--main", "--checkpoint.async_mode", "async", "--checkpoint.interval", "5")
    stopped = train(run, *words, "--kill", "0:5")
    assert stopped.codes == [85, 85], stopped.outputs
    found = outcome(run) or {}
    assert {"optimizer", "dataloader", "train_state"} <= contents(found["checkpoint"])
    written = (Path(found["checkpoint"]) / ".metadata").stat().st_mtime
    assert written <= run.outcome(1).stat().st_mtime, "the program has not waited for its save"
    assert saved(run) == ["step-5", f"step-{found['step']}"]
    resumed = train(run, *words, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert (outcome(run, 2) or {})["reason"] == "completed"
    assert (read_json(run.progress(2)) or {})["resumed_step"] == found["step"]
    assert set(metrics(run)) == set(range(1, 13))


def test_run_that_is_to_finish_ends_early_with_a_full_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="stop", then="finish")
    ended = train(run, "--kill", "0:4", "--validator.enable", size=1)
    assert ended.codes == [0], ended.outputs
    step = ended.result()["step"]
    assert 4 <= step <= 6
    assert saved(run) == [f"step-{step}"]
    assert "optimizer" in contents(str(run.path / "out" / "checkpoint" / f"step-{step}"))
    assert (outcome(run) or {})["reason"] == "completed"
    assert set(metrics(run, "validation_loss")) == {1, *range(3, step + 1, 3)}


def test_pruned_trial_ends_without_a_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="pruned", then="finish")
    ended = train(run, "--kill", "1:5")
    assert ended.codes == [0, 0], ended.outputs
    assert saved(run) == []
    assert not any('{"step"' in output for output in ended.outputs), "the code behind train() has run"


def test_stop_at_the_last_step_lets_the_training_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run)
    ended = train(run, "--training.steps", "3", "--kill", "0:3", size=1)
    assert ended.codes == [0], ended.outputs
    assert ended.result() == {"step": 3}
    assert (outcome(run) or {})["reason"] == "completed"


def test_loss_of_a_pipeline_is_that_of_its_last_stage(tmp_path: Path) -> None:
    """The Trainer's own pipeline does not run on torch 2.13; the program has a stand-in for its step."""
    run = make_run(tmp_path / "run")
    words = ("--parallelism.pipeline_parallel_degree", "2", "--training.disable_cuda_graphs")
    ended = train(run, *words, "--training.steps", "2")
    assert ended.codes == [0, 0], ended.outputs
    assert metrics(run) == metrics(run, "max_loss") == {1: 3.0, 2: 3.0}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("--checkpoint.no-enable", "Set --checkpoint.enable"),
        ("--checkpoint.load_only", "--checkpoint.load_only switches saving off"),
        ("--checkpoint.load_step=3", "--checkpoint.load_step=3 would be loaded at each start"),
    ],
)
def test_trainer_that_could_not_continue_is_refused(tmp_path: Path, setting: str, named: str) -> None:
    ended = train(make_run(tmp_path / "run"), setting, size=1)
    assert ended.codes == [1], ended.outputs
    assert named in ended.outputs[0]


def test_trainer_outside_of_a_run_is_unchanged(tmp_path: Path) -> None:
    words = ("--dump_folder", str(tmp_path), "--checkpoint.no-enable", "--training.steps", "2")
    ended = run_ranks(PROGRAM, words, size=1)
    assert ended.codes == [0], ended.outputs
    assert ended.result() == {"step": 2}
