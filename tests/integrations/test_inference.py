"""jobs/inference: a transformers model answers prompts on several ranks, stopped and killed at random points.

The answers are compared, byte for byte, with those of an undisturbed run on another number of ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from hpcaccel.core.run_dir import RunDir
from hpcaccel.spec import load_spec
from tests.cluster.scenario import Scenario
from tests.runtime.ranks import Ended, Ranks, make_run, outcome, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "inference"
PAGE = ROOT / "docs" / "inference.md"
PRELOAD = ("transformers.models.llama.modeling_llama", "transformers.models.byt5.tokenization_byt5")

PROMPTS = 41
MODEL_WORDS = ("--batch-size", "2", "--max-new-tokens", "20", "--temperature", "1.5")


def tiny_model(folder: Path) -> Path:
    """A Llama with random weights that reads and writes bytes."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.ByT5Tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts, and the answers of an undisturbed run on one rank."""
    folder = tmp_path_factory.mktemp("inference")
    tiny_model(folder / "model")
    write_prompts(folder / "prompts.jsonl", PROMPTS)
    ended = generate(folder, folder / "undisturbed.jsonl", size=1).wait()
    assert ended.codes == [0], ended.outputs
    return folder


def write_prompts(file: Path, count: int) -> None:
    lines = [json.dumps({"prompt": f"What is {number} plus {number * number}?"}) for number in range(count)]
    file.write_text("".join(f"{line}\n" for line in lines))


def generate(made: Path, output: Path, *more: str, size: int = 2, **options: Any) -> Ranks:
    words = ["--model", made / "model", "--prompts", made / "prompts.jsonl", "--output", output, *MODEL_WORDS, *more]
    return Ranks(str(JOB / "generate.py"), *map(str, words), size=size, preload=PRELOAD, **options)


def lines_of(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def check_answers(made: Path, output: Path) -> None:
    """Every prompt once, in order, with the answer of the undisturbed run."""
    found = lines_of(output)
    assert [line["index"] for line in found] == list(range(PROMPTS))
    assert len({line["result"] for line in found}) > PROMPTS // 2, "the answers differ, so that a swap would show"
    assert output.read_bytes() == (made / "undisturbed.jsonl").read_bytes()


def disturbed(made: Path, folder: Path, seed: int, number: signal.Signals) -> list[Ended]:
    """Start until the answers are complete, each time on another number of ranks, and signal all ranks at a random
    point, as Slurm does."""
    random, ends, output = Random(seed), list[Ended](), folder / "answers.jsonl"
    run = make_run(folder / "run")
    while not ends or set(ends[-1].codes) != {0}:
        attempt = len(ends) + 1
        ranks = generate(made, output, size=random.choice([1, 2, 2, 3]), run=run, attempt=attempt, blocked=True)
        wait_for_growth(output, ranks)
        time.sleep(random.uniform(0, 0.5))
        for process in ranks.processes:
            process.send_signal(number)
        ends.append(ranks.wait())
        assert set(ends[-1].codes) <= ({0, 85} if number == signal.SIGTERM else {0, -number}), ends[-1].outputs
        assert attempt < 30, "no attempt makes progress"
        if 85 in ends[-1].codes:
            assert (outcome(run, attempt) or {})["resume"] is True
    return ends


def wait_for_growth(output: Path, ranks: Ranks) -> None:
    """Wait until an attempt has written an answer, or has ended."""
    folder = Path(f"{output}.parts")
    before = size_of(folder)
    give_up = time.monotonic() + 120
    while size_of(folder) == before and any(process.poll() is None for process in ranks.processes):
        assert time.monotonic() < give_up
        time.sleep(0.005)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in list(folder.glob("*.jsonl")) if path.exists())


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 11))])
def test_answers_are_those_of_an_undisturbed_run(made: Path, tmp_path: Path, seed: int, number: signal.Signals) -> None:
    ends = disturbed(made, tmp_path, seed, number)
    assert len(ends) >= 2, "no attempt was interrupted"
    check_answers(made, tmp_path / "answers.jsonl")
    if number == signal.SIGTERM:
        missing = [int(re.findall(r"step (\d+)", end.outputs[0])[-1]) for end in ends if 85 in end.codes]
        assert missing == sorted(set(missing)), "each attempt adds answers"


def test_greedy_answers_on_two_ranks_equal_those_on_one(made: Path, tmp_path: Path) -> None:
    for size in (1, 2):
        ended = generate(made, tmp_path / f"{size}.jsonl", "--temperature", "0", size=size).wait()
        assert ended.codes == [0] * size, ended.outputs
        assert f"{PROMPTS} answers are in" in ended.outputs[0]
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_offloaded_model_gives_the_same_answers_through_a_stop(made: Path, tmp_path: Path) -> None:
    """Two ranks, each with the whole model: a part in memory, the rest read from the weight file at each use."""
    words, output = ("--offload", str(tmp_path / "offload"), "--cpu-memory", "40KB"), tmp_path / "answers.jsonl"
    run = make_run(tmp_path / "run")
    ranks = generate(made, output, *words, run=run, blocked=True)
    wait_for_growth(output, ranks)
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)
    stopped = ranks.wait()
    assert stopped.codes == [85, 85], stopped.outputs
    for rank in range(2):
        index = json.loads((tmp_path / "offload" / f"rank_{rank}" / "index.json").read_text())
        assert {entry["safetensors_file"] for entry in index.values()} == {str(made / "model" / "model.safetensors")}
    resumed = generate(made, output, *words, size=1, run=run, attempt=2, blocked=True).wait()
    assert resumed.codes == [0], resumed.outputs
    check_answers(made, output)


@pytest.mark.parametrize("call", re.findall(r"`((?:cpu|disk)_offload\(.*?\))`", PAGE.read_text()))
def test_model_that_is_loaded_already_can_be_offloaded(made: Path, tmp_path: Path, call: str) -> None:
    loads = f"""
    from transformers import AutoModelForCausalLM

    model, folder = AutoModelForCausalLM.from_pretrained(args.model).eval(), f"{{args.output}}-{{state.process_index}}"
    return hpcaccel.{call}
"""
    head, line, rest = (JOB / "generate.py").read_text().partition("def load(args, state):\n")
    assert line
    (tmp_path / "generate.py").write_text(head + line + loads + rest)
    output = tmp_path / "answers.jsonl"
    words = ["--model", made / "model", "--prompts", made / "prompts.jsonl", "--output", output, *MODEL_WORDS]
    ended = run_ranks(str(tmp_path / "generate.py"), [str(word) for word in words], preload=PRELOAD)
    assert ended.codes == [0, 0], ended.outputs
    check_answers(made, output)


# -- as a job ---------------------------------------------------------------------------------------------------------


def test_spec_is_valid_and_the_page_shows_spec_and_script() -> None:
    spec = load_spec(JOB / "job.yaml")
    assert spec.total_nodes == 2
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    texts = dict(reversed(blocks))
    assert texts["yaml"] in (JOB / "job.yaml").read_text()
    assert texts["python"] in (JOB / "generate.py").read_text()


VLLM = """
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, seed):
        self.seed = seed


class Completion:
    def __init__(self, text):
        self.text = text


class RequestOutput:
    def __init__(self, text):
        self.outputs = [Completion(text)]


class LLM:
    def __init__(self, *, model):
        self.model = model

    def generate(self, prompts, sampling_params):
        return [RequestOutput(f"{self.model} {sampling_params.seed} {prompt.upper()}") for prompt in prompts]
"""


def test_vllm_program_of_the_page_runs_with_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n((?:(?!```).*\n)*?.*from vllm (?:(?!```).*\n)*)```", PAGE.read_text(), re.M)
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "program.py").write_text(program)
    write_prompts(tmp_path / "prompts.jsonl", 600)
    monkeypatch.chdir(tmp_path)
    ended = run_ranks(str(tmp_path / "program.py"), ["tiny"])
    assert ended.codes == [0, 0], ended.outputs
    lines = lines_of(tmp_path / "answers.jsonl")
    assert [line["result"] for line in lines] == [
        f"tiny {number // 256} {line['item'].upper()}" for number, line in enumerate(lines)
    ]
    assert len(lines) == 600


LONG_PROMPTS = 120


def on_cpus(folder: Path) -> dict[str, Any]:
    """The job of jobs/inference/job.yaml on CPUs, with a tiny model. ``slurm`` is the caller's."""
    spec: dict[str, Any] = yaml.safe_load((JOB / "job.yaml").read_text())
    del spec["name"], spec["slurm"], spec["resilience"]
    tiny_model(folder / "model")
    write_prompts(folder / "prompts.jsonl", LONG_PROMPTS)
    spec["entrypoint"]["script"] = str(JOB / "generate.py")
    spec["entrypoint"]["args"] |= {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "batch-size": 1,
        "max-new-tokens": 100,
    }
    spec["environment"] = {"python": sys.executable, "env": {"HF_HUB_OFFLINE": "1", "HPCACCEL_USE_CPU": "1"}}
    return spec


def wait_for_answers(scenario: Scenario, count: int) -> None:
    """Wait until the ranks have written this many batches."""
    folder = scenario.dir.path / "answers.jsonl.parts"

    def written() -> bool:
        return sum(path.read_bytes().count(b"\n") for path in list(folder.glob("*.jsonl"))) >= count

    scenario._wait(lambda: written() or scenario.lines("end"), f"{count} answers")
    assert not scenario.lines("end"), scenario.story


def check_job(scenario: Scenario, reason: str) -> None:
    """Two attempts; the second one did what the first had left; every prompt once and in order."""
    assert scenario.ends == [(reason, "requeue"), ("completed", "end")], scenario.story
    first, second = scenario.lines("end")
    assert 0 < first["last_step"] < LONG_PROMPTS
    assert second["resumed_step"] == first["last_step"] == first["checkpoint_step"], scenario.story
    assert second["last_step"] == LONG_PROMPTS
    assert scenario.status()["steps_lost"] == 0
    lines = lines_of(scenario.dir.path / "answers.jsonl")
    prompts = (scenario.folder / "prompts.jsonl").read_text().splitlines()
    assert [line["item"] for line in lines] == [json.loads(prompt)["prompt"] for prompt in prompts]
    assert [line["index"] for line in lines] == list(range(LONG_PROMPTS))
    assert os.listdir(scenario.dir.path / "answers.jsonl.parts") == ["manifest.json"]


def test_job_of_the_page_finds_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^\$ (hpcaccel submit jobs/inference/job\.yaml)$", PAGE.read_text(), re.M)
    shutil.copytree(JOB, tmp_path / "jobs" / "inference")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scenario = Scenario(None, tmp_path)
    smaller = ["slurm.nodes=1", "slurm.gpus_per_node=1", "args.max-new-tokens=4"]
    model = f"args.model={tiny_model(tmp_path / 'model')}"
    answer = scenario.cli(*command.split()[1:], "--cluster", "local", model, *smaller, "--json")
    scenario.dir = RunDir(json.loads(answer.stdout)["path"])
    assert scenario.wait_until_over() == 0, scenario.story
    prompts = (JOB / "prompts.jsonl").read_text().splitlines()
    lines = lines_of(scenario.dir.path / "answers.jsonl")
    assert [line["item"] for line in lines] == [json.loads(prompt)["prompt"] for prompt in prompts]


@pytest.mark.chaos
def test_job_that_is_stopped_and_requeued_answers_every_prompt_once(tmp_path: Path) -> None:
    scenario = Scenario(None, tmp_path)
    local = {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 2, "mem": None}
    scenario.submit({**on_cpus(tmp_path), "slurm": local})
    wait_for_answers(scenario, 5)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    check_job(scenario, "stop")
