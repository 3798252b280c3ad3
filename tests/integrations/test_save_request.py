"""``hpcaccel save`` for other trainers: one checkpoint, on both ranks after the same step, and the training goes on."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcaccel.core.stop_requests import leave_save_request
from tests.runtime.ranks import make_run, metrics, outcome, run_ranks

pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "programs"
PRELOAD = {
    "transformers": ("transformers.trainer", "accelerate"),
    "lightning": ("lightning.pytorch",),
    "accelerate": ("accelerate",),
}
TRAINERS = {
    "transformers": ("--output_dir", "checkpoint-*"),
    "lightning": ("--root", "hpcaccel-step=*.ckpt"),
    "accelerate": ("--output_dir", "checkpoint-*"),
    "torchtitan": ("--dump_folder", "checkpoint/step-*"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_request_makes_one_checkpoint_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    if find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run.1")  # as hpcaccel's launcher sets it; Lightning reads it
    option, pattern = TRAINERS[trainer]
    run = make_run(tmp_path / "run")
    leave_save_request(run)
    steps = "--training.steps" if trainer == "torchtitan" else "--steps"
    words = (option, str(run.path / "out"), steps, "12")
    program = str(PROGRAMS / f"train_{trainer}.py")
    ended = run_ranks(program, words, run=run, blocked=True, preload=PRELOAD.get(trainer, ()))
    assert ended.codes == [0, 0], ended.outputs
    assert ended.result()["step"] == 12
    assert (outcome(run) or {})["reason"] == "completed"
    saved = [int(re.findall(r"\d+", path.name)[-1]) for path in (run.path / "out").glob(pattern)]
    by_request = sorted(step for step in saved if step < 12)  # transformers and torchtitan also save at the end
    assert len(by_request) == 1, saved
    assert [path.name.partition("-")[0] for path in run.control.iterdir()] == ["honoured"]
    assert max(metrics(run)) == 12
