"""Export of model weights to safetensors and torch files, and loading of these files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing import export_model, load_model, mapped_load, model_weight_files
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.settings import Settings
from tests.runtime.ranks import make_run, run_ranks

pytestmark = pytest.mark.torch

ALONE = RankGroup(
    RankEnvironment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="", master_port=0, source="single"
    ),
    torch.device("cpu"),
    None,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


def save(value: Any, path: Path, **options: Any) -> None:
    export_model.save(value, path, ALONE, Settings(), **options)


def save_model(model: nn.Module, path: Path, **options: Any) -> None:
    model_weight_files.save_model(model, path, ALONE, Settings(), **options)


def test_two_ranks_export_whole_tensors_with_fsdp_and_ddp(tmp_path: Path) -> None:
    ended = run_ranks("exporting.py", [str(tmp_path)])
    assert ended.codes == [0, 0], ended.outputs
    told = [json.loads(line) for line in ended.outputs[0].splitlines() if line.startswith("{")]
    assert told.pop() == {"done": True}
    for item in told:
        stem, suffix = ("model", ".safetensors") if item["safe"] else ("pytorch_model", ".bin")
        assert f"{stem}{suffix}.index.json" in item["many"]
        assert f"{stem}-00001-of-0000{len(item['many']) - 1}{suffix}" in item["many"]
        assert item["one"] == [stem + suffix]
    states = [torch.load(tmp_path / name, weights_only=True) for name in ("fsdp/all.pt", "ddp/all.pt")]
    assert [state["step"] for state in states] == [3, 3]
    sharded, replicated = (state["model"] for state in states)
    alone = torch.load(tmp_path / "ddp" / "alone.pt", weights_only=True)
    assert list(sharded) == list(replicated) == list(alone)
    for name, value in sharded.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, replicated[name])
    assert sharded["embed.weight"].data_ptr() == sharded["head.weight"].data_ptr()
    for strategy in ("fsdp", "ddp"):
        found = load_file(tmp_path / strategy / "all.safetensors")
        assert set(found) == set(sharded) - {"head.weight"}
        assert torch.equal(found["embed.weight"], sharded["embed.weight"])


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("save", 22),
        pytest.param("save_model", 24, marks=pytest.mark.chaos),
        pytest.param("save_state", 28, marks=pytest.mark.chaos),
        pytest.param("load_state", 30, marks=pytest.mark.chaos),
    ],
)
def test_sharded_call_on_rank_0_alone_raises_with_line_and_missing_rank(tmp_path: Path, call: str, line: int) -> None:
    run = make_run(tmp_path / "run", runtime={"control_timeout_seconds": 2.0})
    ended = run_ranks("main_only.py", [call, str(tmp_path)], run=run)
    assert all(ended.codes), ended.outputs
    assert f"RuntimeMisuse: {call}() at" in ended.outputs[0].replace("hpcaccel.errors.", "")
    for said in ended.outputs:
        assert f"main_only.py:{line}: rank 1 did not reach this call within 2 s" in said


def test_failed_save_leaves_the_previous_file_intact(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(AttributeError, match="pickle"):
        save({"a": lambda: None}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_safetensors_export_rejects_values_other_than_named_tensors(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMisuse, match="unlike these entries: step"):
        save({"weight": torch.ones(2), "step": 3}, tmp_path / "x.safetensors", safe=True)
    with pytest.raises(RuntimeMisuse, match="not a list"):
        save([torch.ones(2)], tmp_path / "x.safetensors", safe=True)


def test_tensors_that_share_memory_are_written_once_or_copied() -> None:
    base = torch.arange(6.0)
    given = {"a": base, "b": base, "part": base[:3], "turned": base.reshape(2, 3).t(), "empty": torch.empty(0)}
    kept = export_model.clean_state_dict_for_safetensors(given)
    assert list(kept) == ["a", "part", "turned", "empty"]
    assert len({value.data_ptr() for value in kept.values()}) == 4
    assert all(value.is_contiguous() for value in kept.values())
    assert len(given) == 5


@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights_are_still_tied_after_export_and_load(tmp_path: Path, safe: bool) -> None:
    model, other = Tied(), Tied()
    save_model(model, tmp_path, safe=safe, max_shard_size="64B")
    index = json.loads(next(tmp_path.glob("*.index.json")).read_text())
    assert index["metadata"]["total_size"] == 4 * (16 + 4 + 4)
    assert ("second.weight" in index["weight_map"]) is not safe
    mapped_load.load_checkpoint_in_model(other, tmp_path, strict=True)
    assert other.second.weight is other.first.weight
    assert all(torch.equal(other.state_dict()[name], value) for name, value in model.state_dict().items())


def test_save_model_rejects_file_paths_meta_tensors_and_invalid_sizes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeMisuse, match="this path is a file"):
        save_model(Tied(), tmp_path / "file")
    with torch.device("meta"), pytest.raises(RuntimeMisuse, match=r"first\.weight is on the meta device"):
        save_model(Tied(), tmp_path / "meta")
    with pytest.raises(RuntimeMisuse, match="not a size"):
        save_model(Tied(), tmp_path / "x", max_shard_size="big")


def test_file_that_could_run_code_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"first.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        mapped_load.load_checkpoint_in_model(Tied(), tmp_path)


def test_weights_of_another_model_load_only_if_not_strict_and_shapes_match(tmp_path: Path) -> None:
    torch.save({"first.weight": torch.zeros(4, 4), "third": torch.ones(1)}, tmp_path / "x.bin")
    model = Tied()
    mapped_load.load_checkpoint_in_model(model, tmp_path / "x.bin")
    assert not model.second.weight.any()
    with pytest.raises(
        CheckpointError, match=r"missing from the checkpoint: first\.bias, second\.bias; only in the checkpoint: third"
    ):
        mapped_load.load_checkpoint_in_model(model, tmp_path / "x.bin", strict=True)
    torch.save({**Tied().state_dict(), **{f"x{at}": torch.ones(1) for at in range(7)}}, tmp_path / "x.bin")
    with pytest.raises(
        CheckpointError, match=r"this model: only in the checkpoint: x0, x1, x2, x3, x4 and 2 more\. Pass strict=False"
    ):
        mapped_load.load_checkpoint_in_model(model, tmp_path / "x.bin", strict=True)
    torch.save({"first.weight": torch.zeros(3, 4)}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"shape \(3, 4\) in x\.bin, but \(4, 4\) in the model"):
        mapped_load.load_checkpoint_in_model(model, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model.load_state_dict(tmp_path / "y.bin")
    with pytest.raises(RuntimeMisuse, match="pass a folder as offload_folder"):
        mapped_load.load_checkpoint_in_model(model, tmp_path / "x.bin", device_map={"a": "cpu", "b": "disk"})
