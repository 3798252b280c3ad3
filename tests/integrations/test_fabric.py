"""Loops of Lightning's Fabric with ``add_stop_gate``: one agreed step, a save in time, the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.runtime.ranks import make_run, metrics, outcome, request_stop, run_ranks

pytest.importorskip("lightning")
pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).parent / "programs" / "train_fabric.py")
PRELOAD = ("lightning.fabric",)


@pytest.fixture(autouse=True)
def torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hpcaccel's launcher sets it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run.1")


def train(run: RunDir, *arguments: str, attempt: int = 1, size: int = 2) -> Any:
    words = ("--output_dir", str(run.path / "out"), *arguments)
    return run_ranks(PROGRAM, words, size=size, run=run, attempt=attempt, blocked=True, preload=PRELOAD)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_stopped_loop_saves_at_one_step_and_continues_with_the_same_losses(tmp_path: Path, strategy: str) -> None:
    options = ("--strategy", strategy, "--accumulate", "2")
    undisturbed = make_run(tmp_path / "undisturbed")
    ended = train(undisturbed, *options)
    assert ended.codes == [0, 0], ended.outputs
    run = make_run(tmp_path / "run")
    request_stop(run)
    stopped = train(run, *options, "--kill", "1:20", "--workers", "1", "--save_steps", "15")
    assert stopped.codes == [85, 85], stopped.outputs
    found = outcome(run) or {}
    step = found["step"]
    assert 20 <= step <= 22
    assert (found["reason"], found["resume"]) == ("preempted", True)
    checkpoint = run.path / "out" / f"hpcaccel-step={step}.ckpt"
    assert found["checkpoint"] == str(checkpoint)
    assert checkpoint.is_dir() == (strategy == "fsdp2")
    # Checkpoints of later steps that were not written completely:
    (run.path / "out" / "hpcaccel-step=98.ckpt").mkdir()
    (run.path / "out" / "hpcaccel-step=99.ckpt").write_bytes(b"PK\x03\x04 torn")
    resumed = train(run, *options, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == ended.result() == {"step": 40, "rate": pytest.approx(0.05 * 0.1**4)}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"]) == (step, found["checkpoint"])
    assert progress["total_steps"] == 40
    expected = metrics(undisturbed)
    assert list(expected) == list(range(1, 41))
    assert metrics(run) == expected


def test_checkpoint_that_the_loop_has_saved_itself_is_continued_at_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = train(run, "--steps", "18", "--save_steps", "5", size=1)
    assert first.codes == [0], first.outputs
    second = train(run, "--steps", "20", attempt=2, size=1)
    assert second.codes == [0], second.outputs
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], Path(progress["resumed_from"]).name) == (15, "step=15.ckpt")


def test_run_that_is_to_finish_runs_the_code_behind_its_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="stop", then="finish")
    ended = train(run, "--kill", "0:5", size=1)
    assert ended.codes == [0], ended.outputs
    assert 5 <= ended.result()["step"] <= 7
    assert (outcome(run) or {})["reason"] == "completed"
    assert not list((run.path / "out").glob("*"))


def test_pruned_trial_ends_without_a_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request_stop(run, reason="pruned", then="finish")
    ended = train(run, "--kill", "1:5")
    assert ended.codes == [0, 0], ended.outputs
    assert not list((run.path / "out").glob("*"))


def test_fabric_that_would_train_a_copy_on_each_rank_is_refused(tmp_path: Path) -> None:
    ended = train(make_run(tmp_path / "run"), "--strategy", "auto", "--devices", "1")
    assert 0 not in ended.codes
    assert all("this Fabric trains with 1 rank(s), but the run has 2" in text for text in ended.outputs), ended.outputs
