"""`hpcaccel estimate-memory`: its sources, its verdicts against a cluster's GPUs, and its messages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import UserError
from hpcaccel.launch import gpu_memory
from hpcaccel.launch.gpu_memory import GpuKind, gpu_kinds, kinds_of_cluster, memory_of
from hpcaccel.spec.cluster.facts_sections import NodeType
from tests.cli.conftest import Shell

FACTORY = """\
def tied():
    from torch import nn
    first, last = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Linear(8, 8).requires_grad_(False), last, nn.BatchNorm1d(4))
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip
SPEC = """\
name: gpt
entrypoint: {command: [echo, hello]}
slurm: {nodes: 2, gpus_per_node: 'a100:4', partition: gpu, time: '10:00'}
runtime: {strategy: fsdp, mixed_precision: bf16, activation_checkpointing: true}
"""
FACTS = """\
{version: 1, name: alps, probed_at: 1700000000, slurm_version: 23.11.4,
 partitions: [{name: gpu, nodes: 4, node_types: [a, b]}, {name: old, node_types: [v]}, {name: cpu, node_types: [c]}],
 node_types: [{name: a, gpus: {a100: 4}, features: [gpu80g]}, {name: b, gpus: {h100: 4}}, {name: v, gpus: {v100: 2}},
              {name: c, cpus: 64}]}
"""


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file with a header and holes instead of data: only headers are read."""
    head, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        length = math.prod(shape) * {"F32": 4, "BF16": 2, "I64": 8}[dtype]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


@pytest.fixture
def big(shell: Shell) -> Path:
    """A folder like that of a model with 7 billion parameters, in two files."""
    folder = shell.folder / "model"
    layer = {"q": [4096, 4096], "k": [4096, 4096], "v": [4096, 4096], "o": [4096, 4096], "gate": [11008, 4096],
             "up": [11008, 4096], "down": [4096, 11008]}  # fmt: skip
    tensors = {f"model.layers.{n}.{key}": ("BF16", shape) for n in range(32) for key, shape in layer.items()}
    safetensors(folder / "model-00001-of-00002.safetensors", tensors)
    rest = {"model.embed.weight": ("BF16", [32000, 4096]), "model.inv_freq": ("F32", [64])}
    safetensors(folder / "model-00002-of-00002.safetensors", rest)
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
             "max_position_embeddings": 2048}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture
def alps(shell: Shell) -> None:
    shell.write("../config/hpcaccel/clusters/alps.yaml", "runs_dir: /tmp\n")
    shell.write("../config/hpcaccel/clusters/alps.facts/facts.yaml", FACTS)


def answer(shell: Shell, *words: str) -> dict[str, Any]:
    result = shell("estimate-memory", *words, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def row(found: dict[str, Any], strategy: str, precision: str) -> dict[str, Any]:
    (one,) = [one for one in found["rows"] if (one["strategy"], one["precision"]) == (strategy, precision)]
    return dict(one)


BIG = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096


def test_safetensors_folder_needs_headers_only(shell: Shell, big: Path) -> None:
    found = answer(shell, "model", "--gpu-memory", "80GiB", "--gpus", "8")
    assert (found["parameters"], found["sequence_length"]) == (BIG, 2048)
    ddp, fsdp = row(found, "ddp", "mixed"), row(found, "fsdp", "mixed")
    assert ddp["parameters_bytes"] == 4 * BIG + 64 * 4, "the buffer too"
    assert (ddp["fits"], fsdp["fits"]) == ({"GPU 80GiB": False}, {"GPU 80GiB": True})
    assert fsdp["parameters_bytes"] == 4 * BIG // 8 + 64 * 4


def test_single_file_without_configuration_has_unknown_activations(shell: Shell) -> None:
    safetensors(shell.folder / "one.safetensors", {"w": ("F32", [10, 10])})
    found = answer(shell, "one.safetensors")
    assert (found["parameters"], row(found, "ddp", "fp32")["activations_bytes"]) == (100, None)
    assert found["activations_unknown_because"] == "there is no config.json beside the weights"
    shown = shell("estimate-memory", "one.safetensors").stdout
    assert "activations are not known (there is no config.json beside the weights)" in shown
    assert " ? " in shown
    assert "no GPUs to compare with" in shown


def test_folder_with_two_copies_of_a_model_counts_one(shell: Shell) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        safetensors(shell.folder / f"model/{name}.safetensors", {name: ("F32", [10])})
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shell.write("model/model.safetensors.index.json", json.dumps(index))
    assert answer(shell, "model")["parameters"] == 20
    (shell.folder / "model/model.safetensors.index.json").unlink()
    safetensors(shell.folder / "model/model.safetensors", {"w": ("F32", [30])})
    assert answer(shell, "model")["parameters"] == 30


def test_config_json_is_built_without_memory(shell: Shell) -> None:
    pytest.importorskip("transformers")
    shell.write("llama/config.json", json.dumps(LLAMA))
    found = answer(shell, "llama", "--batch-size", "2")
    assert found["parameters"] == 2 * 100 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert (found["sequence_length"], found["batch_size"]) == (256, 2)
    tokens = 256 * 2 * 64
    expected = 34 * tokens * 3 + 4 * tokens + 4 * 256 * 2 * 100
    assert row(found, "ddp", "bf16")["activations_bytes"] == expected


def test_python_function_is_called_on_the_meta_device(shell: Shell) -> None:
    pytest.importorskip("torch")
    shell.write("factory.py", FACTORY)
    found = answer(shell, "factory:tied", "--optimizer", "sgd")
    assert found["parameters"] == 50 * 8 + 8 * 8 + 8 + 4 + 4, "tied parameters count once"
    assert found["trained_parameters"] == 50 * 8 + 8
    assert row(found, "ddp", "fp32")["gradients_bytes"] == (50 * 8 + 8) * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["factory:absent"], "factory:absent cannot be imported: AttributeError"),
        (["nowhere:make"], "nowhere:make cannot be imported: ModuleNotFoundError"),
        (["absent"], "'absent' is not a model: give a safetensors file or folder"),
        (["empty"], "has neither *.safetensors nor config.json"),
        (["bad.json"], "bad.json cannot be read"),
        (["bad.safetensors"], "not a safetensors file"),
        (["job.yaml"], "job.yaml does not name the model that it trains"),
        (["factory:tied", "--optimizer", "adam"], "--optimizer 'adam' is not valid (allowed: adamw"),
        (["factory:tied", "--gpu-memory", "lots"], "--gpu-memory 'lots' is not a size"),
        (["factory:tied", "--gpu-memory", "80"], "--gpu-memory 80 is 80 bytes: write 80GB"),
        (["factory:tied", "--gpu-memory", "81559"], "--gpu-memory 81559 is 81559 bytes: write 81559MiB"),
        (["factory:tied", "--gpu-memory", "80kB"], "80kB is 80000 bytes: give the memory of a GPU, such as 80GB"),
        (["factory:tied", "--model", "x"], "--model is for a job spec"),
        (["factory:tied", "--cluster", "absent"], "no cluster profile 'absent'"),
        (["factory:tied", "--cluster", "unprobed"], "run `hpcaccel cluster probe unprobed` first"),
        (["factory:tied", "--python", "/nowhere"], "/nowhere cannot be started"),
    ],
)
def test_mistake_is_explained(shell: Shell, refused: Callable[..., str], words: list[str], message: str) -> None:
    (shell.folder / "empty").mkdir()
    shell.write("factory.py", FACTORY)
    shell.write("bad.json", "{")
    shell.write("bad.safetensors", "text")
    shell.write("job.yaml", SPEC)
    shell.write("../config/hpcaccel/clusters/unprobed.yaml", "runs_dir: /tmp\n")
    assert message in refused(shell("estimate-memory", *words))


def test_job_spec_gives_ranks_strategy_and_gpus(shell: Shell, big: Path, alps: None) -> None:
    shell.write("job.yaml", SPEC)
    found = answer(shell, "job.yaml", "--model", "model", "--cluster", "alps")
    assert (found["gpus"], found["gpus_per_node"], found["activation_checkpointing"]) == (8, 4, True)
    assert found["spec"] == {"strategy": "fsdp", "precision": "mixed"}
    assert [one["name"] for one in found["gpu_kinds"]] == ["a100"], "the type that the spec requests"
    assert row(found, "fsdp", "mixed")["fits"] == {"a100 80GB": True}
    shown = shell("estimate-memory", "job.yaml", "--model", "model", "--cluster", "alps").stdout
    assert "* the job spec's fsdp with mixed precision fits on a100 80GB" in shown
    assert "\n* fsdp      mixed" in shown
    single = shell("estimate-memory", "job.yaml", "--model", "model", "--gpus", "1", "--gpu-memory", "10GB").stdout
    assert "the job spec's fsdp with mixed precision does not fit on a100 10GB" in single
    assert "nothing fits on 1 x a100 10GB; fsdp with mixed precision fits on" in single


def test_gpus_of_a_cluster_have_a_verdict_each(shell: Shell, big: Path, alps: None) -> None:
    found = answer(shell, "model", "--cluster", "alps")
    assert [one["name"] for one in found["gpu_kinds"]] == ["a100", "h100", "v100"]
    assert found["gpus"] == 4, "those of a node"
    verdicts = row(found, "fsdp", "mixed")["fits"]
    assert verdicts == {"a100 80GB": True, "h100 80GB": True, "v100 16GB": False}
    shown = shell("estimate-memory", "model", "--cluster", "alps").stdout
    assert "v100 with 16 GiB is assumed; there are also some with 32 GiB (--gpu-memory)" in shown
    assert "fits" in shown
    assert "does not fit" in shown


def test_job_spec_uses_the_newest_checkpoint_of_its_runs(shell: Shell) -> None:
    """A real checkpoint of a small model, saved by a run."""
    pytest.importorskip("torch")
    shell.write("train.py", TRAIN)
    shell.write("job.yaml", "name: gpt\nentrypoint: {script: train.py}\nslurm: {time: '10:00'}\n")
    done = shell("submit", "job.yaml", "--cluster", "local", "--wait")
    assert done.returncode == 0, done.stderr
    found = answer(shell, "job.yaml")
    assert found["parameters"] == 5 * 7 + 7
    assert "/checkpoints/step_" in found["source"]
    assert answer(shell, found["source"])["parameters"] == 5 * 7 + 7


TRAIN = """\
import torch
from hpcaccel import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(5, 7)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in accelerator.steps(1):
    accelerator.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("name", "hints", "expected"),
    [
        ("a100", [], 40),
        ("a100", ["rack3", "gpu80g"], 80),
        ("nvidia_a100_80gb_pcie", [], 80),
        ("a100", ["mem512g"], 40),
        ("NVIDIA_H100_80GB_HBM3", [], 80),
        ("mi250x", [], 64),
        ("a10", [], 24),
        ("l40s", [], 48),
        ("l4", [], 24),
        ("quantum9000", [], None),
    ],
)
def test_memory_of_a_type(name: str, hints: list[str], expected: int | None) -> None:
    assert memory_of(name, hints)[0] == expected


def test_types_without_known_memory_are_named() -> None:
    nodes = [NodeType(name="x", gpus={"gpu": 4}), NodeType(name="y", gpus={"quantum": 1}), NodeType(name="z", cpus=4)]
    kinds, notes = gpu_kinds(nodes)
    assert kinds == []
    assert notes == [
        "nodes x have GPUs without a type: give their memory with --gpu-memory",
        "the memory of GPU type 'quantum' is not known: give it with --gpu-memory",
    ]


def test_local_cluster_has_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [{"name": "NVIDIA H100", "bytes": 85 * 10**9}] * 4
    monkeypatch.setattr(gpu_memory, "torch_facts", lambda: {"devices": devices})
    assert kinds_of_cluster("local") == ([GpuKind("NVIDIA H100", 85 * 10**9, 4)], [])
    assert GpuKind("NVIDIA H100", 85 * 10**9, 4).label == "NVIDIA H100 79GiB"
    monkeypatch.setattr(gpu_memory, "torch_facts", lambda: {"devices": []})
    assert kinds_of_cluster("local")[1] == ["this machine has no GPUs: give their memory with --gpu-memory"]
    monkeypatch.setattr(gpu_memory, "torch_facts", lambda: {"problem": "ImportError: libcudart"})
    with pytest.raises(UserError, match="because torch cannot be imported: ImportError: libcudart"):
        kinds_of_cluster("local")
