"""jobs/grpo: TRL's GRPOTrainer, and beside it a server that generates, through a stop in the middle of a generation.

Real are TRL with its HTTP client, the Trainer, the callback and the run. vLLM needs CUDA, so both of its ends are
stand-ins: ``grpo_server.py`` (the routes, JSON and order of calls of ``vllm serve``; random completions) and
``grpo_train.py`` (the weights' way to the server, over TCP instead of NCCL).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcaccel.spec import load_spec
from tests.cluster.scenario import Scenario

pytest.importorskip("trl")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "grpo"
PAGE = ROOT / "docs" / "grpo.md"
PROGRAMS = Path(__file__).parent / "programs"

STEPS = 7
HELD = 3
"""The generation that the server answers only when it is released."""


def test_page_shows_the_spec_and_lines_of_the_script() -> None:
    spec = load_spec(JOB / "job.yaml")
    assert list(spec.components) == ["vllm"]
    assert spec.launch_watch("/work") is not None
    blocks = dict(re.findall(r"^```(yaml|python)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert blocks["yaml"] == "".join((JOB / "job.yaml").read_text().splitlines(keepends=True)[1:])
    assert blocks["python"] in (JOB / "train.py").read_text()


@pytest.mark.chaos
def test_stop_during_a_generation_loses_no_step_and_the_new_server_gets_the_weights(tmp_path: Path) -> None:
    (tmp_path / "scenario").mkdir()
    scenario, released = Scenario(None, tmp_path / "scenario"), tmp_path / "released"
    local = {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 2, "mem": None}
    scenario.submit({**on_cpus(tmp_path, released), "slurm": local})
    wait_until_held(scenario)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    scenario._wait(scenario.dir.stop(1).exists, "the request to the ranks")
    release(scenario, released)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story
    check(scenario)


def wait_until_held(scenario: Scenario) -> None:
    """Wait until the trainer waits for completions that the server holds back."""
    scenario._wait(lambda: events(scenario, 1, "holding") or scenario.lines("end"), "a generation that is held")
    assert events(scenario, 1, "holding"), scenario.story


def release(scenario: Scenario, released: Path) -> None:
    """Let the server answer."""
    assert not scenario.lines("end"), scenario.story
    assert len(events(scenario, 1, "answered")) == HELD - 1
    released.touch()


def check(scenario: Scenario) -> None:
    """Two attempts have lost no step, and each had a server of its own that got the weights."""
    first, second = scenario.lines("end")
    step = first["last_step"]
    assert HELD <= step <= HELD + 2, scenario.story
    assert first["checkpoint"] == f"{scenario.dir.path}/out/checkpoint-{step}"
    assert second["resumed_step"] == first["checkpoint_step"] == step
    assert second["last_step"] == STEPS
    assert scenario.status()["steps_lost"] == 0
    assert set(scenario.losses) == set(range(1, STEPS + 1))

    for attempt, steps in ((1, step), (2, STEPS - step)):
        scenario._wait(lambda attempt=attempt: events(scenario, attempt, "interrupted"), "the end of the server")
        assert len(events(scenario, attempt, "ready")) == 1
        assert len(events(scenario, attempt, "answered")) == steps
        generations = events(scenario, attempt, "generation")
        assert [one["updates"] for one in generations] == list(range(1, steps + 1)), "weights before each generation"

    sent = [event["hashes"] for event in events(scenario, 1, "weights")]
    assert sent[0] != sent[-1], "the weights have not changed, so the next line would show nothing"
    assert events(scenario, 2, "weights")[0]["hashes"] == hashes(Path(first["checkpoint"]))


def on_cpus(folder: Path, released: Path) -> dict[str, Any]:
    """The job of jobs/grpo/job.yaml on CPUs: a tiny model, the stand-ins, and free ports. ``slurm`` is the caller's."""
    spec: dict[str, Any] = yaml.safe_load((JOB / "job.yaml").read_text())
    del spec["name"]
    model = tiny_model(folder / "model")
    port, group_port = free_ports(2)
    serve = spec["components"]["vllm"]["entrypoint"]["args"]
    other = {spec["entrypoint"]["args"]["model"]: str(model), serve[serve.index("--port") + 1]: port}
    words = [str(other.get(word, word)) for word in serve]
    spec["components"]["vllm"] = {
        "entrypoint": {
            "command": [sys.executable, str(PROGRAMS / "grpo_server.py"), *words, "--hold", str(HELD), str(released)]
        },
        "slurm": {"nodes": 1},
    }
    code = folder / "code"
    code.mkdir()
    for file in (JOB / "train.py", PROGRAMS / "grpo_train.py"):
        shutil.copy(file, code)
    spec["entrypoint"]["script"] = str(code / "grpo_train.py")
    spec["entrypoint"]["args"] |= {
        "model": str(model),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "learning_rate": 0.01,
        "vllm_server_timeout": 120,
        "vllm_server_port": port,
        "vllm_group_port": group_port,
        "use_cpu": True,
        "bf16": "false",
        "gradient_checkpointing": "false",
    }
    spec["environment"]["python"] = sys.executable
    spec["environment"]["env"] |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "localhost,127.0.0.1"}
    del spec["slurm"]
    return spec


def tiny_model(folder: Path) -> Path:
    """A Llama with random weights, and a tokenizer of digits and a few words."""
    import tokenizers
    import transformers

    words = ["<pad>", "<eos>", "<unk>", *"0123456789", "What", "is", "+", "?", "user", "assistant", "so", "the", "sum"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), tokenizers.pre_tokenizers.Digits(individual_digits=True)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def events(scenario: Scenario, attempt: int, name: str) -> list[dict[str, Any]]:
    """What the server of an attempt has reported, in order."""
    log = scenario.dir.attempt(attempt) / "vllm-0.log"
    lines = log.read_text().splitlines() if log.exists() else []
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [event for event in found if event["event"] == name]


def hashes(checkpoint: Path) -> dict[str, str]:
    """The hash of each weight in a checkpoint, as the server reports those that it gets."""
    from safetensors.numpy import load_file

    tensors = load_file(checkpoint / "model.safetensors")
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}
