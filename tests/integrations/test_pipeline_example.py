"""jobs/inference/pipeline.py, and models of transformers as pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcaccel.spec import load_spec
from tests.runtime.ranks import ROOT, run_ranks

from .test_inference import JOB, PRELOAD, tiny_model, write_prompts

pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def test_example_scores_texts_as_a_single_rank_does(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl", 11)
    scores = {}
    for size in (1, 2):
        output = tmp_path / f"scores-{size}.jsonl"
        words = ["--model", tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl", "--output", output]
        words += ["--length", "24", "--chunk-rows", "2", "--chunks", "3"]
        ended = run_ranks(str(JOB / "pipeline.py"), list(map(str, words)), size=size, preload=PRELOAD)
        assert ended.codes == [0] * size, ended.outputs
        scores[size] = [json.loads(line) for line in output.read_text().splitlines()]
    assert "the stages begin at model.layers." in ended.outputs[0]
    assert f"11 scores are in {output}" in ended.outputs[1]
    assert [line["prompt"] for line in scores[2]] == [
        json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()
    ]
    assert [line["score"] for line in scores[2]] == pytest.approx([line["score"] for line in scores[1]], rel=1e-4)
    assert len({line["score"] for line in scores[2]}) == 11


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama"])
def test_pipeline_is_equal_to_the_whole_model(name: str) -> None:
    ended = run_ranks("pipelined_transformers.py", [name], preload=PRELOAD)
    assert ended.codes == [0, 0], ended.outputs


def test_page_shows_the_calls_of_the_example_and_its_spec() -> None:
    page = (ROOT / "docs" / "inference.md").read_text()
    shown = page.partition("## A model over several GPUs")[2].partition("\n## ")[0]
    program = (JOB / "pipeline.py").read_text()
    (code,) = [part.partition("```")[0] for part in shown.split("```python\n")[1:]]
    assert code in program
    (text,) = [part.partition("```")[0] for part in shown.split("```yaml\n")[1:]]
    assert text in (JOB / "pipeline.yaml").read_text()
    assert load_spec(JOB / "pipeline.yaml").total_nodes == 1
