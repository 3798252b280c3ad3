"""Accelerate's files of a training in one process, and its functions around FSDP2."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcaccel.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_in_model
from hpcaccel.runtime.parallel.meta_device import init_empty_weights
from hpcaccel.utils import (
    FullyShardedDataParallelPlugin,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    ensure_weights_retied,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    get_model_tp_size,
    load_fsdp_model,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

pytestmark = pytest.mark.torch


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=float(2**seed))

    def step(self) -> None:
        self.model(torch.randn(6, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def objects(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        return [self.model], [self.optimizer], [self.scheduler], []

    def same_as(self, other: Training) -> bool:
        tensors = zip(self.model.state_dict().values(), other.model.state_dict().values(), strict=True)
        mine, its = self.optimizer.state_dict(), other.optimizer.state_dict()
        states = [
            torch.equal(mine["state"][number][key], value)
            for number, values in its["state"].items()
            for key, value in values.items()
        ]
        return (
            all(torch.equal(one, two) for one, two in tensors)
            and states != []
            and all(states)
            and mine["param_groups"] == its["param_groups"]
            and self.scheduler.state_dict() == other.scheduler.state_dict()
            and self.scaler.state_dict() == other.scaler.state_dict()
        )


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_with(function: Any, training: Training, folder: Path, *, safe: bool) -> None:
    models, optimizers, schedulers, loaders = training.objects()
    states = [model.state_dict() for model in models]
    function(
        folder, states, optimizers, schedulers, loaders, 0, 17, training.scaler, safe_serialization=safe
    )  # fmt: skip


def load_with(function: Any, training: Training, folder: Path) -> Any:
    return function(folder, *training.objects(), 0, training.scaler)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(("writer", "reader"), [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")])
def test_files_of_a_training_are_the_same_here_and_in_accelerate(
    tmp_path: Path, writer: str, reader: str, safe: bool
) -> None:
    theirs = pytest.importorskip("accelerate.checkpointing")
    pytest.importorskip("accelerate").PartialState(cpu=True)
    save = save_accelerator_state if writer == "ours" else theirs.save_accelerator_state
    load = load_accelerator_state if reader == "ours" else theirs.load_accelerator_state
    first, second = Training(1), Training(2)
    first.step()
    save_with(save, first, tmp_path, safe=safe)
    expected = draws()
    draws()
    assert load_with(load, second, tmp_path) == {"step": 17}
    assert draws() == expected
    assert second.same_as(first)


def test_training_without_files_of_the_generators_is_loaded(tmp_path: Path) -> None:
    first, second = Training(1), Training(2)
    first.step()
    save_with(save_accelerator_state, first, tmp_path, safe=True)
    (tmp_path / "random_states_0.pkl").unlink()
    assert load_with(load_accelerator_state, second, tmp_path) == {}
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin does not exist"):
        load_with(load_accelerator_state, second, tmp_path)
    with pytest.raises(RuntimeMisuse, match="map_location='gpu'"):
        load_accelerator_state(tmp_path, [], [], [], [], 0, map_location="gpu")


def test_weights_of_a_wrapped_model_are_loaded_into_a_plain_one(tmp_path: Path) -> None:
    first, second = Training(1), Training(2)
    first.step()
    torch.save({f"module.{key}": value for key, value in first.model.state_dict().items()}, tmp_path / "p.bin")
    (tmp_path / "p.bin").rename(tmp_path / "pytorch_model.bin")
    load_accelerator_state(tmp_path, [second.model], [], [], [], 0)
    assert torch.equal(second.model[0].weight, first.model[0].weight)


class Keeper:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_custom_state_is_loaded_but_never_runs_code(tmp_path: Path) -> None:
    save_custom_state(Keeper(np.arange(3)), tmp_path, 2)
    found = Keeper(None)
    load_custom_state(found, tmp_path, 2)
    assert found.value.tolist() == [0, 1, 2]
    save_custom_state(Keeper(Path("x")), tmp_path)
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl cannot be read as tensors .* GLOBAL pathlib"):
        load_custom_state(found, tmp_path)


@pytest.mark.parametrize("kind", ["single", "indexed", "mixed", "flat index"])
def test_bin_files_are_loaded_into_a_model_on_the_meta_device(tmp_path: Path, kind: str) -> None:
    import json

    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    state = source.state_dict()
    if kind == "single":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        first = {key: value for key, value in state.items() if key.startswith("0.")}
        rest = {key: value for key, value in state.items() if not key.startswith("0.")}
        torch.save(first, tmp_path / "a.bin")
        last = "b.safetensors" if kind == "mixed" else "b.bin"
        safetensors.save_file(rest, tmp_path / last) if kind == "mixed" else torch.save(rest, tmp_path / last)
        places = dict.fromkeys(first, "a.bin") | dict.fromkeys(rest, last)
        index = places if kind == "flat index" else {"weight_map": places}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert torch.equal(model(torch.ones(1, 2)), source(torch.ones(1, 2)))


def test_flat_index_of_safetensors_files_is_read_like_that_of_bin_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    source = nn.Linear(2, 3)
    safetensors.save_file(source.state_dict(), tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight": "a.safetensors", "bias": "a.safetensors"}')
    model = nn.Linear(2, 3)
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert torch.equal(model.weight, source.weight)


def test_merging_names_the_directory_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing does not exist"):
        merge_fsdp_weights(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "step" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "step" / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="one of its directories: pytorch_model_fsdp_0"):
        merge_fsdp_weights(tmp_path / "step", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is damaged"):
        merge_fsdp_weights(tmp_path / "step" / "pytorch_model_fsdp_0", tmp_path / "out", remove_checkpoint_dir=True)
    assert (tmp_path / "step" / "pytorch_model_fsdp_0").is_dir()


def test_optimizer_of_a_dcp_directory_is_merged_into_a_nested_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_fsdp_optimizer(None, None, optimizer, model, tmp_path)
    with pytest.raises(CheckpointError, match="safe_serialization=False"):
        merge_fsdp_weights(tmp_path / "optimizer_0", tmp_path / "out")
    merge_fsdp_weights(tmp_path / "optimizer_0", tmp_path / "out", safe_serialization=False)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert torch.equal(found["state"]["weight"]["momentum_buffer"], torch.ones(2, 2))
    (group,) = found["param_groups"]
    assert (group["params"], group["lr"], group["nesterov"]) == (["weight", "bias"], 0.1, False)


# -- functions around FSDP2


def test_ram_efficient_loading_sets_the_variables_that_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "True")
    disable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "False")


def test_tied_weights_are_tied_again_after_each_module_is_initialised() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 4))
    device = torch.device("cpu")

    def initialise(module: nn.Module) -> nn.Module:
        return module.to_empty(device=device, recurse=False)

    assert ensure_weights_retied(initialise, model, device) is initialise
    model[1].weight = model[0].weight
    model = model.to("meta")
    model[1].weight = model[0].weight
    again = ensure_weights_retied(initialise, model, device)
    for module in model.modules():
        again(module)
    assert not any(one.is_meta for one in model.parameters())
    assert model[1].weight is model[0].weight
    assert model[2].weight is not model[0].weight


def test_names_are_freed_of_the_wrappers_parts() -> None:
    given = {"_orig_mod.layers.0._checkpoint_wrapped_module.up._orig_mod.weight": 1, "head.bias": 2}
    assert fsdp2_canonicalize_names(given) == {"layers.0.up.weight": 1, "head.bias": 2}


def test_optimizer_gets_the_parameters_of_the_mapping() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(old.parameters(), lr=1.0)
    pairs = list(zip(old.parameters(), new.parameters(), strict=True))
    with pytest.raises(RuntimeMisuse, match="no parameter for 1 of the 2 parameters"):
        fsdp2_switch_optimizer_parameters(optimizer, {pairs[0][0].data_ptr(): pairs[0][1]})
    assert optimizer.param_groups[0]["params"][0] is old.weight
    fsdp2_switch_optimizer_parameters(optimizer, {one.data_ptr(): other for one, other in pairs})
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(new.weight), id(new.bias)]
    # Accelerate replaces the old parameters with placeholders that keep the address.
    placeholder: Any = torch.empty(1)
    placeholder.data_ptr = 7
    optimizer.param_groups[0]["params"] = [placeholder]
    fsdp2_switch_optimizer_parameters(optimizer, {7: old.weight})
    assert optimizer.param_groups[0]["params"][0] is old.weight


def test_tensor_parallel_size_is_read_where_transformers_records_it() -> None:
    model: Any = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    model.config = type("Config", (), {"distributed_config": {"tp_size": 2}})()
    assert get_model_tp_size(model) == 2
    model.tp_size = 4
    assert get_model_tp_size(model) == 4


def test_gradient_scaler_is_torchs() -> None:
    scaler = get_fsdp2_grad_scaler(device="cpu", init_scale=4.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.get_scale() == 4.0


def test_regions_are_compiled_in_place() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    model = nn.Sequential(nn.Linear(2, 2), Block())
    whole = nn.Linear(2, 2)
    stack = nn.Sequential(Block(), Block())
    assert compile_regions_fsdp2(whole, backend="eager") is whole
    assert compile_regions_fsdp2(stack, backend="eager") is stack
    assert compile_regions_deepspeed(model, backend="eager") is None
    assert all(one._compiled_call_impl is not None for one in (whole, *stack, model))
    assert stack._compiled_call_impl is None


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_only_the_adapter_of_a_peft_model_is_saved(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, r=2)
        return peft.get_peft_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), config)

    first, second = adapted(1), adapted(2)
    save_fsdp_model(plugin, None, first, tmp_path, adapter_only=True)
    assert load_fsdp_model(plugin, None, second, tmp_path, adapter_only=True).unexpected_keys == []
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) is ("lora" in name), name
    with pytest.raises(CheckpointError, match="has no weights for"):
        load_fsdp_model(plugin, None, second, tmp_path)
