"""Accelerate's files of a training in a directory of an earlier save; files that are damaged or contain code."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.checkpointing import load_accelerator_state, load_custom_state, save_accelerator_state
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.load_model import load_state_dict
from hpcaccel.utils import (
    FullyShardedDataParallelPlugin,
    load_checkpoint_in_model,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

pytestmark = pytest.mark.torch


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_save_in_the_other_format_replaces_the_earlier_model(tmp_path: Path) -> None:
    for value, safe in ((1.0, True), (2.0, False), (3.0, True)):
        states = [model_of(value).state_dict()] * 2
        save_accelerator_state(tmp_path, states, [], [], [], 0, 0, safe_serialization=safe)
        loaded = [model_of(0.0), model_of(0.0)]
        load_accelerator_state(tmp_path, loaded, [], [], [], 0)
        assert [model.weight[0, 0].item() for model in loaded] == [value, value]


def test_nothing_of_an_earlier_save_of_more_objects_and_ranks_is_loaded(tmp_path: Path) -> None:
    one, two = model_of(1.0), model_of(2.0)
    save_accelerator_state(tmp_path, [one.state_dict(), two.state_dict()], [optimizer_of(one)], [], [], 1, 10)
    for name in ("model.bin", "optimizer.pt"):
        (tmp_path / name).write_text("not a file of such a save")
    save_accelerator_state(tmp_path, [one.state_dict()], [optimizer_of(one)], [], [], 0, 20)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model.bin", "model.safetensors", "optimizer.bin", "optimizer.pt", "random_states_0.pkl"]
    assert load_accelerator_state(tmp_path, [one], [], [], [], 0) == {"step": 20}
    assert load_accelerator_state(tmp_path, [one], [], [], [], 1) == {}  # there was no such rank


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise OSError("the disk is full")


def test_an_interrupted_save_is_not_loaded(tmp_path: Path) -> None:
    model = model_of(1.0)
    save_accelerator_state(tmp_path, [model.state_dict()], [optimizer_of(model)], [], [], 0, 10)
    with pytest.raises(OSError, match="the disk is full"):
        save_accelerator_state(tmp_path, [model.state_dict()], [optimizer_of(model)], [Failing()], [], 0, 20)
    assert (tmp_path / "optimizer.bin").exists()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin does not exist"):
        load_accelerator_state(tmp_path, [model], [], [], [], 0)


def test_files_of_save_fsdp_model_beside_the_other_states_are_kept(tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    model = model_of(1.0)
    save_fsdp_model(plugin, None, model, tmp_path)
    save_fsdp_optimizer(plugin, None, optimizer_of(model), model, tmp_path)
    save_accelerator_state(tmp_path, [], [], [], [], 0, 5)
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= {path.name for path in tmp_path.iterdir()}


def test_shards_of_ranks_that_no_longer_exist_are_removed(tmp_path: Path) -> None:
    old, others = tmp_path / "pytorch_model_fsdp_0_rank1.bin", tmp_path / "pytorch_model_fsdp_1_rank1.bin"
    old.touch()
    others.touch()
    save_fsdp_model(None, None, model_of(1.0), tmp_path, use_dcp=False)
    assert not old.exists()
    assert others.exists()


@pytest.mark.parametrize(
    ("kind", "use_dcp"), [("SHARDED_STATE_DICT", True), ("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", True)]
)
def test_lists_in_the_state_of_an_optimizer_are_loaded(tmp_path: Path, kind: str, use_dcp: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    saved, loaded = (torch.optim.LBFGS(model.parameters(), max_iter=4) for _ in range(2))

    def loss() -> Any:
        saved.zero_grad()
        result = (model(torch.ones(1, 2)) - 3).square().sum()
        result.backward()
        return result

    saved.step(loss)
    save_fsdp_optimizer(plugin, None, saved, model, tmp_path, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, None, loaded, model, tmp_path, use_dcp=use_dcp)
    (expected,), (found,) = saved.state.values(), loaded.state.values()
    assert found.keys() == expected.keys()
    assert len(found["old_dirs"]) == len(expected["old_dirs"]) > 0
    assert all(torch.equal(one, other) for one, other in zip(found["old_dirs"], expected["old_dirs"], strict=True))


@pytest.mark.parametrize("content", [b"\x80\x02X\x02\x00\x00\x00\xff\xff.", b"\x80\x020.", b"a", b""])
def test_damaged_files_are_errors_of_the_checkpoint(tmp_path: Path, content: bytes) -> None:
    for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin", "optimizer.bin"):
        (tmp_path / name).write_bytes(content)
    model = model_of(1.0)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin cannot be read"):
        load_accelerator_state(tmp_path, [], [optimizer_of(model)], [], [], 0)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        load_state_dict(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp\.bin cannot be read"):
        load_fsdp_model(FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT"), None, model, tmp_path)


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_no_file_runs_code_when_it_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    save_fsdp_model(None, None, model, tmp_path)
    save_fsdp_model(None, None, model, tmp_path, model_index=1)
    sharded = tmp_path / "pytorch_model_fsdp_0"
    evil = Command(f"touch {tmp_path}/ran")
    (tmp_path / "pytorch_model_fsdp_1" / ".metadata").write_bytes(pickle.dumps(evil))
    written = io.BytesIO()
    torch.save(evil, written)
    data = sharded / "__0_0.distcp"
    data.write_bytes(written.getvalue().ljust(data.stat().st_size, b"\0"))
    names = "pytorch_model optimizer scheduler pytorch_model_fsdp pytorch_model_fsdp_0_rank0"
    for name in [f"{name}.bin" for name in names.split()] + ["scaler.pt", "random_states_0.pkl"]:
        torch.save({"weight": evil}, tmp_path / name)
    torch.save({"weight": evil}, tmp_path / "custom_checkpoint_0.pkl")
    full = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    optimizer = optimizer_of(model)
    loads: list[Any] = [
        lambda: load_fsdp_model(None, None, model, tmp_path),
        lambda: load_fsdp_model(None, None, model, tmp_path, 1),
        lambda: load_fsdp_model(None, None, model, tmp_path, use_dcp=False),
        lambda: load_fsdp_model(full, None, model, tmp_path),
        lambda: load_fsdp_optimizer(full, None, optimizer, model, tmp_path),
        lambda: merge_fsdp_weights(sharded, tmp_path / "out"),
        lambda: load_accelerator_state(tmp_path, [model], [], [], [], 0),
        lambda: load_accelerator_state(tmp_path, [], [optimizer], [], [], 0),
        lambda: load_accelerator_state(tmp_path, [], [], [optimizer], [], 0),
        lambda: load_accelerator_state(tmp_path, [], [], [], [], 0, scaler=optimizer),
        lambda: load_accelerator_state(tmp_path, [], [], [], [], 0),
        lambda: load_custom_state(optimizer, tmp_path),
        lambda: load_checkpoint_in_model(model, tmp_path / "pytorch_model.bin"),
        lambda: load_checkpoint_in_model(model, tmp_path / "pytorch_model.bin", {"": "cpu"}),
    ]
    for load in loads:
        with pytest.raises(CheckpointError, match=r"posix\.system"):
            load()
    assert not (tmp_path / "ran").exists()


def test_a_file_without_a_dict_is_not_a_model(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="contains a Tensor; weights must be a dict"):
        load_state_dict(tmp_path / "pytorch_model.bin")
