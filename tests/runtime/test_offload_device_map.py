"""Device maps: computed ones, checks, memory of devices, and models that ``prepare`` distributes."""

from __future__ import annotations

import random
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.big_modeling import dispatch_model, init_empty_weights
from hpcaccel.core.free_memory import available_bytes
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.model_preparation import dispatch
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.utils import (
    check_device_map,
    check_tied_parameters_on_same_device,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    infer_auto_device_map,
)
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)
        self.activation = nn.GELU()


class Model(nn.Module):
    def __init__(self, numbers: random.Random) -> None:
        super().__init__()
        width = numbers.choice([4, 8, 12])
        self.embedding = nn.Embedding(numbers.choice([10, 50, 200]), width)
        self.blocks = nn.ModuleList(Block(width, numbers.choice([8, 16])) for _ in range(numbers.randint(1, 9)))
        self.head = nn.Linear(width, self.embedding.num_embeddings, bias=False)
        if numbers.random() < 0.5:
            self.head.weight = self.embedding.weight


def layers(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"part{number}", nn.Linear(*size)) for number, size in enumerate(sizes)))


def test_maps_and_balanced_memory_are_those_of_accelerate() -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    compared = 0
    for seed in range(60):
        numbers = random.Random(seed)
        model = Model(numbers)
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        budget: dict[Any, int] = {
            index: int(size * numbers.uniform(0.05, 0.9)) for index in range(numbers.randint(0, 3))
        }
        if numbers.random() < 0.8:
            budget["cpu"] = int(size * numbers.uniform(0.1, 1))
        options = {
            "no_split_module_classes": numbers.choice([None, ["Block"], "Block"]),
            "dtype": numbers.choice([None, torch.float16, "float16"]),
            "fallback_allocation": numbers.random() < 0.3,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = modeling.infer_auto_device_map(model, max_memory=dict(budget), **options)
            except IndexError:  # Accelerate looks for tied modules that it has placed already
                infer_auto_device_map(model, budget, **options)
                continue
            assert infer_auto_device_map(model, budget, **options) == expected, seed
            given = dict(budget), options["no_split_module_classes"]
            assert get_balanced_memory(model, *given) == modeling.get_balanced_memory(model, *given), seed
        compared += len(set(expected.values())) > 1
    assert compared > 20


def test_full_devices_are_left_and_room_is_kept_for_the_largest_layer() -> None:
    model = layers(*[(4, 4)] * 4)  # 80 bytes each
    full = {"part0": 0, "part1": 0}
    assert infer_auto_device_map(model, {0: 240, "cpu": 170}) == {**full, "part2": "cpu", "part3": "cpu"}
    assert infer_auto_device_map(model, {0: 240, "cpu": 100}) == {**full, "part2": "disk", "part3": "disk"}
    assert infer_auto_device_map(model, {0: "1KB"}) == {"": 0}
    with init_empty_weights():
        empty = layers(*[(4, 4)] * 3)
    assert infer_auto_device_map(empty, {"cpu": 160}) == {"part0": "cpu", "part1": "disk", "part2": "disk"}


def test_tensors_of_a_split_module_get_a_device_and_the_model_runs(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("shift", torch.rand(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(value) * self.scale + self.shift)
            return found

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    expected = model(torch.ones(2, 4))
    places = infer_auto_device_map(model, {"cpu": 240})
    assert {"0.scale", "0.shift", "0.first", "0.second"} <= set(places)
    assert set(places.values()) == {"cpu", "disk"}
    dispatch_model(model, places, offload_dir=tmp_path)
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert torch.equal(model(torch.ones(2, 4)), expected)


def test_largest_layers() -> None:
    model = nn.Sequential(layers((4, 4), (8, 8)), nn.ReLU(), layers((8, 8)))
    sizes = {"0.part0": 80, "0.part1": 288, "1": 0, "2.part0": 288, "0": 368, "2": 288}
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (288, ["0.part1", "2.part0"])
    assert get_max_layer_size(list(model.named_children()), sizes, ["Sequential"]) == (368, ["0"])


def test_wrong_maps_and_devices_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = layers((2, 2), (2, 2))
    with pytest.raises(OffloadError, match=r"no device for part1\.weight, part1\.bias"):
        check_device_map(model, {"part0": "cpu"})
    with pytest.warns(UserWarning, match="do not match any submodules of Sequential: part7"):
        check_device_map(model, {"": "cpu", "part7": 0})
    with pytest.raises(OffloadError, match="max_memory has the device 'gpu'"):
        get_max_memory({"gpu": 1})
    with pytest.raises(RuntimeMisuse, match="is not a size"):
        get_max_memory({"cpu": "much"})
    with pytest.raises(OffloadError, match="puts part1 on disk: pass a folder as offload_dir"):
        dispatch_model(model, {"part0": "cpu", "part1": "disk"})
    with pytest.raises(OffloadError, match="'nowhere' is not a device"):
        dispatch_model(model, {"": "nowhere"})
    check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": "cpu"})
    assert "tied parameters are on different devices" in caplog.text


def test_cpu_memory_is_what_is_left_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.runtime.offload.device_memory.available_bytes", lambda: 123)
    assert get_max_memory()["cpu"] == 123
    monkeypatch.undo()
    free = available_bytes()
    assert free is not None
    assert 0 < get_max_memory()["cpu"] < 2 * free
    assert list(get_max_memory({"disk": 1, "cpu": "1GiB", 1: 5, 0: 4})) == [0, 1, "cpu", "disk"]


# -- prepare


def test_prepare_distributes_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = layers((4, 4), (4, 4))
    expected = model(torch.ones(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    prepared = accelerator.prepare(
        model, device_map={"part0": "disk", "part1": "cpu"}, offload_folder=tmp_path / "disk"
    )
    assert prepared.part0.weight.is_meta
    assert torch.equal(prepared(torch.ones(4)), expected)
    assert all(torch.equal(value, state[name]) for name, value in accelerator.get_state_dict(prepared).items())
    accelerator.save_model(prepared, tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").stat().st_size > sum(one.nbytes for one in state.values())
    auto = accelerator.prepare_model(layers((4, 4)), device_map="auto")
    assert not auto.part0.weight.is_meta
    accelerator.end_training()


def test_prepare_refuses_to_train_or_distribute_what_has_no_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = layers((4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeMisuse, match="such a model cannot be trained"):
        accelerator.prepare(model, optimizer, device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    with init_empty_weights():
        empty = layers((4, 4))
    with pytest.raises(RuntimeMisuse, match="load_checkpoint_and_dispatch"):
        accelerator.prepare(empty, device_map="auto")
    with pytest.raises(RuntimeMisuse, match="needs a model"):
        accelerator.prepare(optimizer, device_map="auto")
    with pytest.raises(OffloadError, match="use 'auto', 'balanced'"):
        accelerator.prepare(layers((4, 4)), device_map="magic")
    accelerator.end_training()


def test_precision_applies_to_an_offloaded_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", project_dir=tmp_path)
    whole = accelerator.prepare_model(layers((64, 64)), evaluation_mode=True)
    expected = whole(torch.ones(64))
    torch.manual_seed(0)
    prepared = accelerator.prepare(layers((64, 64)), device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    assert torch.equal(prepared(torch.ones(64)), expected)
    accelerator.end_training()


PAGE = (Path(__file__).parents[2] / "docs" / "big-models.md").read_text()


def test_ranks_of_the_pages_example_keep_their_weights_apart(tmp_path: Path) -> None:
    """The example runs twice, with other weights on each rank, then from the folders that the first run has left."""
    (example,) = re.findall(r"^## Several ranks\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = example.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("model = accelerator.prepare"))
    program = tmp_path / "example.py"
    program.write_text(
        "\n".join(
            [
                f"import os, torch\nos.chdir({str(tmp_path)!r})\ntorch.manual_seed(int(os.environ['RANK']))",
                *lines[:at],
                "with torch.no_grad():\n    right = model(torch.ones(8)).tolist()",
                *lines[at:],
                "accelerator.wait_for_everyone()",
                "assert model(torch.ones(8)).tolist() == right\nprint('right', right)\naccelerator.end_training()",
            ]
        )
    )
    for _ in range(2):
        ended = run_ranks(str(program), [])
        assert ended.codes == [0, 0], "\n".join(ended.outputs)
        assert ended.outputs[0] != ended.outputs[1]
    assert sorted(path.name for path in (tmp_path / "offloaded-by-prepare").iterdir()) == ["rank_0", "rank_1"]


def test_computed_map_of_several_ranks_leaves_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[Any] = []

    def resolve(model: nn.Module, device_map: str, *, max_memory: Any) -> dict[str, str]:
        budgets.append(max_memory)
        return {"": "cpu"}

    monkeypatch.setattr("hpcaccel.runtime.offload.device_memory.get_max_memory", lambda: {0: 50, 1: 1000, "cpu": 600})
    monkeypatch.setattr("hpcaccel.runtime.offload.device_map.resolve_device_map", resolve)
    env = SimpleNamespace(local_world_size=2)
    group = SimpleNamespace(world_size=2, device=torch.device("cuda", 1), env=env)
    setup: Any = SimpleNamespace(session=SimpleNamespace(group=group))
    dispatch(setup, layers((4, 4)), "auto", offload_folder=None)
    assert budgets == [{1: 900, "cpu": 300}]


def test_each_rank_evaluates_its_part_with_an_offloaded_model(tmp_path: Path) -> None:
    ended = run_ranks("offloaded_ranks.py", [str(tmp_path)])
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    saved = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("saved", "copy-2")]
    assert saved[0] == saved[1]
