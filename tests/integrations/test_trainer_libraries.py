"""Trainers that are built on transformers', with ``HpcaccelCallback``: TRL's SFTTrainer, sentence-transformers.

Each is the real package, with a random model that the program itself builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.runtime.ranks import Ended, make_run, metrics, outcome, run_ranks

for package in ("datasets", "peft", "sentence_transformers", "transformers", "trl"):
    if find_spec(package) is None:  # importorskip() would import them, which takes long
        pytest.skip(f"needs {package}", allow_module_level=True)
pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "programs"
PRELOAD = (
    "datasets",
    "peft",
    "sentence_transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
)
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def train(program: str, run: RunDir, *arguments: str, attempt: int = 1) -> Ended:
    words = ("--output_dir", str(run.path / "out"), *arguments)
    return run_ranks(str(PROGRAMS / program), words, run=run, attempt=attempt, blocked=True, preload=PRELOAD)


def check_stop_and_resume(program: str, tmp_path: Path, *arguments: str) -> Path:
    """Stop the program with a SIGTERM to one rank, resume it, and return the checkpoint of the stop."""
    undisturbed = make_run(tmp_path / "undisturbed")
    ended = train(program, undisturbed, *arguments)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    run = make_run(tmp_path / "run")
    stopped = train(program, run, *arguments, "--kill", "1:5")
    assert stopped.codes == [85, 85], "\n".join(stopped.outputs)
    found = outcome(run) or {}
    step = found["step"]
    assert 5 <= step <= 7
    assert found["resume"] is True
    checkpoint = run.path / "out" / f"checkpoint-{step}"
    assert found["checkpoint"] == str(checkpoint)
    assert [path.name for path in (run.path / "out").glob("checkpoint-*")] == [checkpoint.name]
    assert (read_json(checkpoint / "trainer_state.json") or {})["global_step"] == step
    assert not (run.path / "out" / "final").exists(), "the code behind train() has run"
    assert set(metrics(run)) == set(range(1, step + 1))
    resumed = train(program, run, *arguments, attempt=2)
    assert resumed.codes == [0, 0], "\n".join(resumed.outputs)
    assert resumed.result() == {"step": STEPS}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"]) == (step, str(checkpoint))
    assert progress["total_steps"] == STEPS
    expected = metrics(undisturbed)
    assert list(expected) == list(range(1, STEPS + 1))
    assert metrics(run) == pytest.approx(expected, rel=1e-5)
    return checkpoint


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["whole", "lora"])
def test_supervised_fine_tuning_of_trl_stops_at_one_step_and_resumes(tmp_path: Path, what: str) -> None:
    checkpoint = check_stop_and_resume("train_sft.py", tmp_path, *(["--lora"] if what == "lora" else []))
    weights = {path.name for path in checkpoint.glob("*.safetensors")}
    assert weights == {"adapter_model.safetensors" if what == "lora" else "model.safetensors"}
    final = tmp_path / "run" / "out" / "final"
    assert weights == {path.name for path in final.glob("*.safetensors")}


def test_sentence_transformers_stops_at_one_step_and_resumes(tmp_path: Path) -> None:
    checkpoint = check_stop_and_resume("train_sentences.py", tmp_path)
    assert (checkpoint / "modules.json").is_file()
    assert (tmp_path / "run" / "out" / "final" / "modules.json").is_file()
