"""The arithmetic of `hpcaccel estimate-memory`, compared with real models, optimizers and ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.launch.estimate_source import _gpu_type
from hpcaccel.launch.memory_estimate import (
    OPTIMIZERS,
    RESERVE_BYTES,
    Estimate,
    TrainingSetup,
    activation_bytes,
    estimate,
    estimates,
    gpus_needed,
)
from hpcaccel.launch.model_size import Architecture, ModelSize, ModelTensor
from hpcaccel.spec import JobSpec

PROGRAM = Path(__file__).parent / "programs" / "state_bytes.py"
SEVEN_B = Architecture(layers=32, hidden=4096, heads=32, vocabulary=32000, longest_sequence=4096)


def one_tensor(*shape: int, blocks: int = 1, **options: Any) -> ModelSize:
    tensors = tuple(ModelTensor(f"layers.{number}.w", shape, "float32") for number in range(blocks))
    return ModelSize("test", tensors, **options)


def size_of(module: Any) -> ModelSize:
    kinds = {True: "trained", False: "frozen"}
    parameters = [
        ModelTensor(name, tuple(one.shape), str(one.dtype)[6:], kinds[one.requires_grad])
        for name, one in module.named_parameters()
    ]
    buffers = [
        ModelTensor(name, tuple(one.shape), str(one.dtype)[6:], "buffer") for name, one in module.named_buffers()
    ]
    return ModelSize("test", (*parameters, *buffers))


def net() -> Any:
    """The model of the program."""
    spec = importlib.util.spec_from_file_location("state_bytes", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net()


def parts(found: Estimate) -> dict[str, int]:
    return {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda torch, parameters: torch.optim.AdamW(parameters)),
        ("adafactor", lambda torch, parameters: torch.optim.Adafactor(parameters)),
        ("sgd", lambda torch, parameters: torch.optim.SGD(parameters, lr=0.1)),
        ("sgd-momentum", lambda torch, parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_real_model_and_optimizer_have_the_estimated_bytes(
    name: str, make: Callable[[Any, Any], Any], precision: str
) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.Flatten(), torch.nn.Linear(54, 5, bias=False)
    )
    estimated = estimate(size_of(model), TrainingSetup(optimizer=name), "ddp", precision)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model.to(dtype)
    optimizer = make(torch, model.parameters())
    model(torch.ones(2, 3, 5, 5, dtype=dtype)).sum().backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    measured = {
        "parameters": sum(one.nbytes for one in [*model.parameters(), *model.buffers()]),
        "gradients": sum(one.grad.nbytes for one in model.parameters()),
        "optimizer": sum(one.nbytes for one in tensors),
    }
    assert parts(estimated) == measured


@pytest.mark.torch
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "no"), ("fsdp", "no"), ("fsdp", "bf16")])
def test_two_real_ranks_store_the_estimated_bytes(strategy: str, precision: str) -> None:
    pytest.importorskip("torch")
    from tests.runtime.ranks import run_ranks

    ended = run_ranks(str(PROGRAM), [strategy, precision], size=2)
    assert ended.codes == [0, 0], ended.outputs
    setup = TrainingSetup(gpus=2, gpus_per_node=2)
    estimated = estimate(size_of(net()), setup, strategy, "fp32" if precision == "no" else "mixed")
    assert parts(estimated) == ended.result(), "rank 0 has the most rows, which the estimate counts"


def test_zero_keeps_what_its_paper_says() -> None:
    """Sixteen bytes a parameter in mixed precision with Adam: 2 and 2 in 16 bits, 12 in the optimizer."""
    model, count = one_tensor(1024, 1024), 1024 * 1024
    found = {
        name: parts(estimate(model, TrainingSetup(gpus=4, gpus_per_node=4), name, "mixed"))
        for name in ("zero1", "zero2", "zero3")
    }
    step = 4
    assert found["zero1"] == {"parameters": 2 * count, "gradients": 2 * count, "optimizer": 12 * count // 4 + step}
    assert found["zero2"] == found["zero1"] | {"gradients": 2 * count // 4}
    assert found["zero3"] == found["zero2"] | {"parameters": 2 * count // 4}


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        ("ddp", (1, 1, 1)),
        ("zero1", (1, 1, 8)),
        ("zero2", (1, 8, 8)),
        ("zero3", (8, 8, 8)),
        ("fsdp", (8, 8, 8)),
        ("hybrid", (4, 4, 4)),
    ],
)
def test_sharding_divides_what_it_shards_by_the_ranks_that_share(strategy: str, shares: tuple[int, ...]) -> None:
    found = estimate(one_tensor(1024, 64), TrainingSetup(gpus=8, gpus_per_node=4), strategy, "fp32")
    whole, step = 1024 * 64 * 4, 4
    parameters, gradients, optimizer = (whole // share for share in shares)
    assert parts(found) == {"parameters": parameters, "gradients": gradients, "optimizer": 2 * optimizer + step}


def test_fsdp_counts_whole_rows() -> None:
    """Three rows over four ranks: three ranks have one row each, and so much does the largest store."""
    assert estimate(one_tensor(3, 10), TrainingSetup(gpus=4, gpus_per_node=4), "fsdp", "fp32").parameters == 10 * 4


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    frozen = ModelSize("test", (ModelTensor("a", (8, 8), "float32", "frozen"), ModelTensor("b", (4,), "float32")))
    found = parts(estimate(frozen, TrainingSetup(), "ddp", "fp32"))
    assert found == {"parameters": 68 * 4, "gradients": 4 * 4, "optimizer": 2 * 4 * 4 + 4}


def test_eight_bit_states_have_a_scale_for_each_block() -> None:
    setup = TrainingSetup(optimizer="adamw-8bit")
    assert estimate(one_tensor(4096), setup, "ddp", "fp32").optimizer == 2 * (4096 + 16 * 4)
    assert estimate(one_tensor(4095), setup, "ddp", "fp32").optimizer == 2 * 4095 * 4, "small tensors stay in fp32"


def test_activations_follow_the_formula_of_korthikanti_et_al() -> None:
    tokens = 2048 * 4096
    setup = TrainingSetup(sequence=2048)
    output = 4 * tokens + 4 * 2048 * 32000
    assert activation_bytes(SEVEN_B, setup, "mixed") == 34 * tokens * 32 + output
    eager = TrainingSetup(sequence=2048, stores_attention=True, batch=3)
    assert activation_bytes(SEVEN_B, eager, "bf16") == 3 * ((34 * tokens + 5 * 32 * 2048**2) * 32 + output)
    recomputed = TrainingSetup(sequence=2048, recomputes=True)
    assert activation_bytes(SEVEN_B, recomputed, "bf16") == 2 * tokens * 32 + 34 * tokens + output
    assert activation_bytes(SEVEN_B, setup, "fp32") == 2 * (34 * tokens * 32 + output)


@pytest.mark.parametrize("architecture", [None, Architecture(2, 8, 2, 10, None)])
def test_unknown_activations_are_none_and_not_zero(architecture: Architecture | None) -> None:
    assert activation_bytes(architecture, TrainingSetup(), "mixed") is None


def test_longest_sequence_counts_up_to_4096_tokens() -> None:
    long = Architecture(32, 4096, 32, 32000, 131072)
    assert activation_bytes(long, TrainingSetup(), "mixed") == activation_bytes(SEVEN_B, TrainingSetup(), "mixed")


def test_total_is_the_larger_of_backward_pass_and_step() -> None:
    found = estimate(one_tensor(1024, 1024), TrainingSetup(), "ddp", "fp32")
    assert found.working == 0
    assert found.total == found.states + found.step + RESERVE_BYTES, "without activations, AdamW's step needs more"
    busy = one_tensor(64, 64, architecture=Architecture(1, 4096, 1, 0, 4096))
    loaded = estimate(busy, TrainingSetup(), "ddp", "fp32")
    assert loaded.activations is not None
    assert loaded.step == 64 * 64 * 4 < loaded.activations
    assert loaded.total == loaded.states + loaded.activations + RESERVE_BYTES


def test_offload_moves_the_states_of_fsdp_to_the_host() -> None:
    setup = TrainingSetup(gpus=2, gpus_per_node=2, cpu_offload=True)
    moved = estimate(one_tensor(1024, 64), setup, "fsdp", "fp32")
    kept = estimate(one_tensor(1024, 64), TrainingSetup(gpus=2, gpus_per_node=2), "fsdp", "fp32")
    assert (moved.states, moved.on_host) == (0, kept.states)
    assert estimate(one_tensor(1024, 64), setup, "ddp", "fp32").on_host == 0


def test_fsdp_gathers_the_outer_parameters_and_two_blocks() -> None:
    tensors = (
        ModelTensor("embedding.w", (100, 10), "float32"),
        *(ModelTensor(f"model.layers.{number}.{name}", (10, 10), "float32") for number in range(4) for name in "ab"),
    )
    found = estimate(ModelSize("test", tensors), TrainingSetup(gpus=2, gpus_per_node=2), "fsdp", "mixed")
    assert found.working == (1000 + 3 * 200) * 2


def test_hybrid_needs_several_nodes() -> None:
    names = {one.strategy for one in estimates(one_tensor(8, 8), TrainingSetup(gpus=4, gpus_per_node=4))}
    assert "hybrid" not in names
    assert "hybrid" in {one.strategy for one in estimates(one_tensor(8, 8), TrainingSetup(gpus=8, gpus_per_node=4))}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_estimated_for_every_row(optimizer: str) -> None:
    found = estimates(one_tensor(8192, 8), TrainingSetup(gpus=8, gpus_per_node=4, optimizer=optimizer))
    assert len(found) == 18
    assert all(one.parameters > 0 and one.gradients > 0 for one in found)
    copies = [one for one in found if one.strategy.startswith("zero") and one.precision == "mixed"]
    assert all(one.optimizer >= 8192 * 8 * 4 // 8 for one in copies), "ZeRO's fp32 copies"
    if optimizer == "sgd":
        assert all(one.optimizer == 0 for one in found if one not in copies)


def test_number_of_gpus_that_is_needed() -> None:
    model = one_tensor(2**14, 2**16, blocks=4)  # 64 GiB of parameters, gradients and optimizer state
    setup = TrainingSetup(gpus=4, gpus_per_node=4, optimizer="adamw")
    needed = gpus_needed(model, setup, "mixed", 32 * 2**30)
    assert needed is not None
    assert estimate(model, TrainingSetup(gpus=needed, gpus_per_node=4), "fsdp", "mixed").fits(32 * 2**30)
    assert not estimate(model, TrainingSetup(gpus=needed // 2, gpus_per_node=4), "fsdp", "mixed").fits(32 * 2**30)
    assert gpus_needed(model, setup, "mixed", 2**30) is None


@pytest.mark.torch
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_activations_of_a_real_model_are_roughly_those_of_the_formula(precision: str) -> None:
    """What autograd keeps of a small LLaMA of transformers, with attention that does not store its matrix."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 500}
    config = transformers.LlamaConfig(**sizes, intermediate_size=344, max_position_embeddings=256)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its address
        return tensor

    tokens = torch.arange(512).remainder(500).view(2, 256)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    measured = sum(storage.nbytes() for storage in kept.values())
    estimated = activation_bytes(Architecture(4, 128, 4, 500, 256), TrainingSetup(batch=2), precision)
    assert estimated is not None
    assert 0.65 * measured < estimated < 1.1 * measured


@pytest.mark.parametrize(
    ("slurm", "kind"),
    [({"gpus_per_node": "a100:4"}, "a100"), ({"gres": "gpu:a100:4,nvme:2"}, "a100"), ({"gres": "gpu:2"}, None)],
)
def test_type_of_gpu_that_a_spec_requests(slurm: dict[str, str], kind: str | None) -> None:
    values = {"name": "x", "entrypoint": {"command": ["true"]}, "slurm": {"ntasks_per_node": 1, **slurm}}
    assert _gpu_type(JobSpec.model_validate(values)) == kind
