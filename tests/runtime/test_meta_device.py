"""Models on the meta device, and weights loaded slice by slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.sharded_load import load_sharded
from hpcaccel.runtime.parallel.meta_device import give_memory, init_empty_weights, init_on_device
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return found


def save(model: nn.Module, path: Path, *, leave_out: tuple[str, ...] = (), **more: torch.Tensor) -> Path:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {key: value for key, value in model.state_dict().items() if key not in leave_out}
    safetensors.save_file({**state, **more}, path)
    return path


def test_sharded_meta_model_is_loaded_by_slices(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ended = run_ranks("materialised.py", [str(tmp_path / "weights")])
    assert ended.codes == [0, 0], "\n".join(ended.outputs)


def test_init_empty_weights_keeps_buffers_and_tied_weights() -> None:
    with init_empty_weights():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.embedding.weight
    assert not nn.Linear(1, 1).weight.is_meta
    with init_empty_weights(include_buffers=True):
        assert all(buffer.is_meta for buffer in Tied().buffers())
    with init_on_device("meta"):
        assert nn.Linear(1, 1).weight.is_meta


def test_load_sharded_fills_a_meta_model_in_one_process(tmp_path: Path) -> None:
    full = Tied()
    full.norm.running_mean += 2
    path = save(full, tmp_path / "model.safetensors", leave_out=("head.weight",))
    with init_empty_weights():
        model = Tied()
    assert load_sharded(model, tmp_path) == ([], [])
    assert model.head.weight is model.embedding.weight
    assert all(torch.equal(value, full.state_dict()[name]) for name, value in model.state_dict().items())
    tokens = torch.tensor([0, 3])
    assert torch.equal(model.eval()(tokens), full.eval()(tokens))
    assert load_sharded(Tied().half(), path) == ([], [])


def test_forward_with_uninitialised_parameters_is_refused() -> None:
    with init_empty_weights(include_buffers=True):
        model = Tied()
    give_memory(model, torch.device("cpu"))
    assert model.norm.running_var.tolist() == [1, 1, 1]  # set by BatchNorm's reset_parameters
    with pytest.raises(RuntimeMisuse, match=r"still uninitialised: .*embedding\.weight"):
        model(torch.tensor([0, 1]))
    nn.init.ones_(model.embedding.weight)
    model(torch.tensor([0, 1]))


def test_load_sharded_reports_mismatched_names_and_shapes(tmp_path: Path) -> None:
    path = save(Tied(), tmp_path / "a.safetensors", leave_out=("head.weight", "norm.bias"), extra=torch.ones(1))
    with pytest.raises(
        CheckpointError, match=r"missing from the checkpoint: norm\.bias; only in the checkpoint: extra"
    ):
        load_sharded(Tied(), path)
    assert load_sharded(Tied(), path, strict=False) == (["norm.bias"], ["extra"])
    other = save(nn.Linear(3, 4), tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \(4, 3\) in b\.safetensors, but \(5, 3\) in the model"):
        load_sharded(nn.Linear(3, 5), other)


def test_load_sharded_reports_missing_and_invalid_files(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_sharded(Tied(), tmp_path / "nothing.safetensors")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"neither .* \(it contains notes\.txt\)"):
        load_sharded(Tied(), tmp_path)
    (tmp_path / "torn.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot read "):
        load_sharded(Tied(), tmp_path / "torn.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"head.weight": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"refers to missing files: gone\.safetensors"):
        load_sharded(Tied(), tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        load_sharded(Tied(), tmp_path)
