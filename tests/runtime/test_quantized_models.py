"""Models quantised with bitsandbytes: outputs near the whole model's, memory, files, offloading."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.big_modeling import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.hooks import remove_hook_from_submodules
from hpcaccel.runtime.compat import availability
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.quantized_layers import get_keys_to_not_convert, replace_with_bnb_layers
from hpcaccel.utils import (
    BnbQuantizationConfig,
    CustomDtype,
    compute_module_sizes,
    has_4bit_bnb_layers,
    infer_auto_device_map,
    load_and_quantize_model,
    load_checkpoint_in_model,
    named_module_tensors,
    set_module_tensor_to_device,
)

pytestmark = [
    pytest.mark.torch,
    # Of older versions of bitsandbytes.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast", "ignore:_check_is_size will be removed"),
]

EIGHT = {"load_in_8bit": True}
FP4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}
NF4 = {**FP4, "bnb_4bit_quant_type": "nf4"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
KINDS = pytest.mark.parametrize("fields", [EIGHT, FP4, NF4, DOUBLE], ids=["8 bits", "fp4", "nf4", "double nf4"])
WORDS = torch.arange(12).view(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 128)
        self.narrow = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(hidden + self.narrow(torch.relu(self.wide(hidden))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(hidden)
        return found


def config(**fields: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(**fields)


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def parameter_bytes(of: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in of.parameters())


@pytest.fixture
def files(tmp_path: Path) -> Path:
    Accelerator(cpu=True).save_model(model(), tmp_path / "files")
    return tmp_path / "files"


def difference(quantized: nn.Module, expected: torch.Tensor) -> float:
    """Of the outputs, relative to their size."""
    with torch.no_grad():
        return float((quantized(WORDS) - expected).norm() / expected.norm())


@KINDS
def test_outputs_are_near_the_whole_models_and_parameters_smaller(fields: dict[str, Any], files: Path) -> None:
    whole = model()
    expected = whole(WORDS).detach()
    quantized = load_and_quantize_model(empty(), config(**fields), files)
    assert 0 < difference(quantized, expected) < (0.01 if fields is EIGHT else 0.15)
    blocks: Any = whole.blocks
    linear = sum(block.wide.weight.numel() + block.narrow.weight.numel() for block in blocks)
    saved = linear * (3 if fields is EIGHT else 3.5)
    assert parameter_bytes(quantized) == parameter_bytes(whole) - saved
    assert has_4bit_bnb_layers(quantized) is (fields is not EIGHT)
    assert not has_4bit_bnb_layers(whole)
    assert type(quantized.head) is nn.Linear  # the last module is not quantised
    in_place = load_and_quantize_model(model(), config(**fields))
    with torch.no_grad():  # bitsandbytes' kernel for CPUs with AVX512-BF16 has no gradients
        outputs = quantized(WORDS)
    assert difference(in_place, outputs) == 0


@KINDS
def test_saved_model_is_loaded_again(fields: dict[str, Any], files: Path, tmp_path: Path) -> None:
    quantized = load_and_quantize_model(empty(), config(**fields), files)
    expected = quantized(WORDS).detach()
    prepared = Accelerator(cpu=True).prepare_model(quantized, evaluation_mode=True)
    assert torch.equal(prepared(WORDS), expected)
    Accelerator(cpu=True).save_model(prepared, tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again = load_and_quantize_model(empty(), config(**fields), tmp_path / "saved")
    assert torch.equal(again(WORDS), expected)
    other = EIGHT if fields is not EIGHT else NF4
    with pytest.raises(CheckpointError, match=r"is not a \d-bit weight of bitsandbytes in the checkpoint"):
        load_and_quantize_model(empty(), config(**other), tmp_path / "saved")
    torch.save(quantized.state_dict(), tmp_path / "state.bin")
    again = load_and_quantize_model(empty(), config(**fields), tmp_path / "state.bin")
    assert torch.equal(again(WORDS), expected)


def map_with_disk() -> dict[str, str]:
    return {"embedding": "cpu", "blocks.0": "disk", "blocks.1.wide": "disk", "blocks.1": "cpu", "head": "cpu"}


def test_offloaded_parts_in_8_bits_are_quantised_in_the_folder(files: Path, tmp_path: Path) -> None:
    expected = load_and_quantize_model(empty(), config(**EIGHT), files)(WORDS)
    folder = tmp_path / "offloaded"
    found = load_and_quantize_model(empty(), config(**EIGHT), files, map_with_disk(), offload_folder=folder)
    for _ in range(2):
        assert torch.equal(found(WORDS), expected)
        assert found.blocks[0].wide.weight.is_meta  # type: ignore[union-attr,index]
        assert found.blocks[0].wide.state.CB is None  # type: ignore[union-attr,index]
    assert (folder / "blocks.0.wide.weight.dat").stat().st_size == 64 * 128
    assert (folder / "blocks.0.wide.SCB.dat").is_file()
    Accelerator(cpu=True).save_model(found, tmp_path / "saved")
    again = load_and_quantize_model(empty(), config(**EIGHT), tmp_path / "saved")
    assert torch.equal(again(WORDS), expected)
    computed = load_and_quantize_model(
        empty(), config(**EIGHT), files, "auto", max_memory={"cpu": 40_000}, offload_folder=tmp_path / "computed"
    )
    assert {"cpu", "disk"} == set(computed.hf_device_map.values())  # type: ignore[union-attr,operator]
    assert torch.equal(computed(WORDS), expected)


def test_offloaded_parts_in_4_bits_are_not_quantised(files: Path, tmp_path: Path) -> None:
    found = load_and_quantize_model(empty(), config(**NF4), files, map_with_disk(), offload_folder=tmp_path / "disk")
    kinds = [type(module).__name__ for name, module in found.named_modules() if name.endswith(("wide", "narrow"))]
    assert kinds == ["Linear", "Linear", "Linear", "Linear4bit"]
    assert 0 < difference(found, model()(WORDS).detach()) < 0.15
    for places in ({"": "disk"}, "auto"):
        with pytest.raises(OffloadError, match="layers in 4 bits are not offloaded"):
            load_and_quantize_model(
                empty(), config(**NF4), files, places, max_memory={"cpu": 30_000}, offload_folder=tmp_path / "other"
            )


@KINDS
@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize(
    "offload",
    [
        lambda found, folder: disk_offload(found, folder),
        lambda found, folder: cpu_offload(found),
        lambda found, folder: dispatch_model(found, map_with_disk(), offload_dir=folder),
    ],
    ids=["disk", "cpu", "map"],
)
def test_quantised_model_is_offloaded_and_gets_its_weights_back(
    fields: dict[str, Any], runs_before: bool, offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    quantized = load_and_quantize_model(model(), config(**fields))
    expected = copy.deepcopy(quantized)(WORDS)
    if runs_before:
        quantized(WORDS)
    names = set(quantized.state_dict())
    offload(quantized, tmp_path / "folder")
    for _ in range(2):
        assert torch.equal(quantized(WORDS), expected)
        assert quantized.blocks[0].wide.weight.is_meta  # type: ignore[union-attr,index]
    remove_hook_from_submodules(quantized)
    assert not any(one.is_meta for one in quantized.parameters())
    assert set(quantized.state_dict()) == names
    assert torch.equal(quantized(WORDS), expected)


def test_modules_and_dtypes_of_the_configuration(files: Path) -> None:
    fields = {**NF4, "torch_dtype": torch.bfloat16, "skip_modules": ["1.wide"], "keep_in_fp32_modules": ["0.narrow"]}
    given = config(**fields)
    for found in (
        load_and_quantize_model(empty(), given, files),
        load_and_quantize_model(model(), given),
    ):
        first, second = found.blocks  # type: ignore[misc]
        assert [type(one).__name__ for one in (first.wide, second.wide, found.head)] == [
            "Linear4bit", "Linear", "Linear4bit",
        ]  # fmt: skip
        assert second.wide.weight.dtype == found.embedding.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
        assert first.narrow.weight.dtype == torch.float32
        assert first.wide.weight.quant_state.dtype == torch.bfloat16
        assert (found.is_loaded_in_4bit, found.is_loaded_in_8bit) == (True, False)
    assert (given.skip_modules, given.keep_in_fp32_modules) == (["1.wide"], ["0.narrow"])


def test_default_keeps_tied_weights_and_the_last_module(caplog: pytest.LogCaptureFixture) -> None:
    tied = model()
    tied.head.weight = nn.Parameter(tied.embedding.weight.detach())
    assert get_keys_to_not_convert(tied) == ["head"]
    tied.head.weight = tied.embedding.weight
    assert get_keys_to_not_convert(tied) == ["embedding", "head"]
    headless = model()
    headless.base_model_prefix = "inner"  # type: ignore[assignment]
    assert get_keys_to_not_convert(headless) == []
    attention = nn.Sequential(nn.MultiheadAttention(64, 2), nn.Linear(64, 64))
    shared = nn.Linear(64, 64)
    attention.extend([shared, shared])
    replace_with_bnb_layers(attention, config(**EIGHT), ["1"])
    assert type(attention[0].out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    assert type(attention[1]) is nn.Linear
    assert attention[2] is attention[3]
    assert type(attention[2]).__name__ == "Linear8bitLt"
    replace_with_bnb_layers(nn.Sequential(nn.ReLU()), config(**EIGHT))
    assert "Sequential has no linear layers that could be quantised" in caplog.text
    load_and_quantize_model(load_and_quantize_model(model(), config(**EIGHT)), config(**EIGHT))
    assert caplog.messages[-1] == "Model is quantised already"


def test_names_that_the_model_lacks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    known = {"skip_modules": ["head", "1.wide", "listed"], "keep_in_fp32_modules": ["blocks.0", "norm.weight"]}
    found = model()
    found._keep_in_fp32_modules = ["listed"]  # type: ignore[assignment]
    load_and_quantize_model(found, config(**EIGHT, **known))
    assert not caplog.text
    wrong = {"skip_modules": ["head", "hed", "1.wyde"], "keep_in_fp32_modules": ["lm"]}
    load_and_quantize_model(model(), config(**EIGHT, **wrong))
    assert caplog.messages == [
        "BnbQuantizationConfig.skip_modules: Model has no module 'hed' (did you mean 'head'?), "
        "'1.wyde' (did you mean '1.wide'?)",
        "BnbQuantizationConfig.keep_in_fp32_modules: Model has no module 'lm'",
    ]


def test_arguments_of_a_wrong_type_and_a_map_that_offloads_all_are_errors(files: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeMisuse, match=r"a BnbQuantizationConfig: call load_and_quantize_model\(model, bnb_"):
        load_and_quantize_model(config(**EIGHT), model())  # type: ignore[arg-type]
    with pytest.raises(RuntimeMisuse, match=r"must be a BnbQuantizationConfig, such as .* but is a dict"):
        load_and_quantize_model(model(), EIGHT)  # type: ignore[arg-type]
    options: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": "10KB"}, "offload_folder": tmp_path / "new"}
    with pytest.raises(OffloadError, match="the device map offloads the whole model, and layers in 4 bits"):
        load_and_quantize_model(empty(), config(**FP4), files, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "load_in_8bit=False, load_in_4bit=False): exactly one of the two must be True"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exactly one of the two must be True"),
        ({"load_in_8bit": 1}, "BnbQuantizationConfig(load_in_8bit=1): it must be a bool"),
        ({**EIGHT, "llm_int8_threshold": "6"}, "(llm_int8_threshold='6'): it must be a number"),
        ({**FP4, "bnb_4bit_quant_type": "int4"}, "(bnb_4bit_quant_type='int4'): it must be 'fp4' or 'nf4'"),
        ({**FP4, "bnb_4bit_compute_dtype": "fp8"}, "(bnb_4bit_compute_dtype='fp8'): it must be 'fp32', 'fp16', 'bf16'"),
        ({**FP4, "skip_modules": "head"}, "(skip_modules='head'): it must be a list of names or None"),
    ],
)
def test_wrong_fields_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        config(**fields)
    assert isinstance(raised.value, RuntimeMisuse)


def test_configuration_knows_the_size_of_its_weights() -> None:
    assert config(**EIGHT).target_dtype == torch.int8
    assert config(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16).bnb_4bit_compute_dtype is torch.bfloat16
    assert config(load_in_4bit=True).bnb_4bit_compute_dtype is torch.float16
    layers = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False), nn.Linear(1, 1))
    sizes = {dtype: compute_module_sizes(layers, dtype)[""] for dtype in (torch.int8, *CustomDtype)}
    assert list(sizes.values()) == [20_002, 20_002, 10_001, 5_000.5]
    assert infer_auto_device_map(layers, {"cpu": 12_000}, dtype=CustomDtype.INT4) == {"": "cpu"}
    assert infer_auto_device_map(layers, {"cpu": 12_000}, dtype=CustomDtype.FP8) == {"": "disk"}


def test_missing_package_weights_and_map_are_errors(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeMisuse, match=r"has no weights\. Pass the files .* weights_location"):
        load_and_quantize_model(empty(), config(**EIGHT))
    incomplete = {name: value for name, value in model().state_dict().items() if name != "blocks.0.wide.weight"}
    torch.save(incomplete, tmp_path / "incomplete.bin")
    with pytest.raises(CheckpointError, match=r"incomplete\.bin has no weights for blocks\.0\.wide\.weight"):
        load_and_quantize_model(empty(), config(**EIGHT), tmp_path / "incomplete.bin")
    with pytest.raises(RuntimeMisuse, match=r"has layers of bitsandbytes, which quantise .* device_map"):
        load_checkpoint_in_model(replace_with_bnb_layers(empty(), config(**EIGHT)), files)
    monkeypatch.setattr(metadata, "version", lambda package: "0.46.0")
    with pytest.raises(
        ImportError, match=r"load_and_quantize_model\(\) needs bitsandbytes>=0\.49, but 0\.46\.0 is inst"
    ):
        load_and_quantize_model(empty(), config(**EIGHT), files)
    monkeypatch.setattr(availability, "found", lambda package: False)
    with pytest.raises(ImportError, match=r"load_and_quantize_model\(\) needs bitsandbytes, .*: pip install 'bits"):
        load_and_quantize_model(empty(), config(**EIGHT), files)


def test_single_weights_are_moved_and_set() -> None:
    quantized = load_and_quantize_model(model(), config(**EIGHT))
    layer: Any = quantized.blocks[0].wide  # type: ignore[union-attr,index]
    numbers, scales = layer.weight.detach().clone(), layer.weight.SCB.clone()
    assert dict(named_module_tensors(layer))["weight"].dtype == torch.int8
    expected = layer(torch.ones(1, 64))
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.is_meta
    assert layer.state.SCB is None
    with pytest.raises(OffloadError, match="needs its scales: pass fp16_statistics"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=numbers)
    set_module_tensor_to_device(layer, "weight", "cpu", value=numbers, fp16_statistics=scales)
    assert torch.equal(layer(torch.ones(1, 64)), expected)
    with pytest.raises(OffloadError, match="bias is not an 8-bit weight of bitsandbytes"):
        set_module_tensor_to_device(layer, "bias", "cpu", value=layer.bias.detach(), fp16_statistics=scales)
    packed: Any = load_and_quantize_model(model(), config(**NF4)).blocks[0].wide  # type: ignore[union-attr,index]
    expected, value = packed(torch.ones(1, 64)), packed.weight.detach().clone()
    set_module_tensor_to_device(packed, "weight", "meta")
    set_module_tensor_to_device(packed, "weight", "cpu", value=value)
    assert torch.equal(packed(torch.ones(1, 64)), expected)
    set_module_tensor_to_device(packed, "weight", "cpu", value=torch.zeros(128, 64))  # quantised on the way
    assert torch.equal(packed(torch.ones(1, 64))[0], packed.bias)
    with pytest.raises(OffloadError, match="has the shape"):
        set_module_tensor_to_device(packed, "weight", "cpu", value=torch.zeros(64, 64))


def test_adapter_on_a_quantised_model_is_trained(files: Path, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    quantized = load_and_quantize_model(empty(), config(**NF4), files)
    for parameter in quantized.parameters():
        parameter.requires_grad_(False)
    adapted = nn.Sequential(quantized, nn.Linear(32, 32))
    optimizer = torch.optim.SGD(adapted[1].parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(adapted, optimizer)
    frozen = quantized.state_dict()["blocks.0.wide.weight"].clone()
    losses = []
    for _ in range(5):
        loss = (prepared(WORDS) - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(quantized.state_dict()["blocks.0.wide.weight"], frozen)
    accelerator.end_training()
