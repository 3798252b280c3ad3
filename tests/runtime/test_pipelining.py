"""``prepare_pippy``: pipelines on real ranks, equal to the whole model; and the division of a model into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.inference import build_pipeline, find_pippy_batch_size, generate_device_map
from hpcaccel.runtime.pipeline.stage_split import split_points_of
from hpcaccel.utils import is_pippy_available

from .ranks import run_ranks

pytestmark = pytest.mark.torch

PRELOAD = ("torch.export", "torch.distributed.pipelining", "pytest")

EQUAL = ("any_number_of_rows", "inputs_for_later_stages_and_nested_outputs")
TWO = (*EQUAL, "evaluation_mode", "no_example", "wrong_settings", "wrong_calls", "helpers")


@pytest.mark.parametrize(("size", "names"), [(2, TWO), (4, EQUAL)])
def test_pipeline_is_equal_to_the_whole_model(size: int, names: tuple[str, ...]) -> None:
    """What is tested beside that, the program's functions name."""
    ended = run_ranks("pipelined.py", names, size=size, preload=PRELOAD)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    assert [line[7:] for line in ended.outputs[0].splitlines() if line.startswith("passed ")] == list(names)


def test_single_rank_computes_with_the_whole_model() -> None:
    ended = run_ranks("pipelined.py", size=1, launcher="alone", preload=PRELOAD)
    assert ended.codes == [0], ended.outputs
    assert "runs on a single rank, so the model is not split" in ended.outputs[0]
    assert "passed alone" in ended.outputs[0]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


class Model(nn.Module):
    """A rotary embedding is registered behind the layers and called before them; its buffer is no reason to split."""

    def __init__(self, widths: list[int], words: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(words, widths[0])
        self.layers = nn.ModuleList(Block(width) for width in widths)
        self.rotary = nn.Module()
        self.rotary.register_buffer("angles", torch.zeros(4))
        self.head = nn.Linear(widths[-1], 2)


def sizes_of(model: nn.Module, device_map: dict[str, int]) -> list[int]:
    found = [0] * (max(device_map.values()) + 1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        (owner,) = [device_map[part] for part in device_map if f"{name}.".startswith(f"{part}.")]
        found[owner] += tensor.nbytes
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("widths", [[16] * 7, [4, 32, 8, 16, 8, 4, 40], [64, 8, 8, 8, 8, 8, 8]])
def test_map_divides_the_blocks_as_evenly_as_possible(widths: list[int], count: int) -> None:
    model = Model(widths)
    found = generate_device_map(model, count, no_split_module_classes=["Block"])
    assert list(found.values()) == sorted(found.values())
    sizes = sizes_of(model, found)
    assert len(sizes) == count
    points = ["embed", *(f"layers.{number}" for number in range(7)), "head"]
    assert all(point in points for point in split_points_of(found, count))
    # All other divisions of the parts are at least as uneven.
    parts = list(found)
    for cuts in combinations(points[1:], count - 1):
        starts = [parts.index(cut) for cut in cuts]
        other = {part: sum(start <= number for start in starts) for number, part in enumerate(parts)}
        assert max(sizes) <= max(sizes_of(model, other))


def test_blocks_are_split_only_if_they_are_larger_than_a_share() -> None:
    split = generate_device_map(Model([16] * 4), 2)
    assert split_points_of(split, 2) == ["layers.2"]
    assert "layers.0" in split
    assert "layers.0.first" in generate_device_map(Model([16] * 2, words=1), 4)
    assert "layers.0" in generate_device_map(Model([16] * 2, words=1), 3, no_split_module_classes="Block")
    model = Model([16] * 2, words=1)
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    assert "layers.0" in generate_device_map(model, 3)
    with torch.device("meta"):
        assert generate_device_map(Model([16] * 4), 2) == split


def test_too_few_parts_are_an_error() -> None:
    with pytest.raises(RuntimeMisuse, match=r"Linear has 0 parts .* too few for 2 ranks: start at most 1 rank$"):
        generate_device_map(nn.Linear(2, 2), 2)
    with pytest.raises(RuntimeMisuse, match=r"Model has 4 parts .* 4 ranks, or pass split_points with 4 module names$"):
        generate_device_map(Model([16] * 2), 5, no_split_module_classes=["Block"])
    with pytest.raises(RuntimeMisuse, match="num_processes=0"):
        generate_device_map(nn.Linear(2, 2), 0)
    with pytest.raises(RuntimeMisuse, match="no module for process 2 of 3"):
        split_points_of({"a": 0, "b": 1}, 3)


def test_class_that_no_module_has_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = Model([16] * 4)
    model._no_split_modules = ["Blocks"]  # type: ignore[assignment]
    for names in (None, ["Block"], model._no_split_modules):
        generate_device_map(model, 2, names)  # type: ignore[arg-type]
    assert not caplog.text
    generate_device_map(model, 2, ["Block", "Lineer"])
    (record,) = caplog.records
    assert record.getMessage() == (
        "no_split_module_classes: Model has no module of class 'Lineer' (did you mean 'Linear'?)"
    )


def test_map_for_given_memory_fills_the_devices_in_order() -> None:
    found = generate_device_map(Model([16] * 4), 2, ["Block"], max_memory={"cpu": 6000, "disk": 10**9})
    assert found["embed"] == "cpu"
    assert found["head"] == "disk"
    assert set(generate_device_map(Model([16] * 4), 1).values()) in ({"cpu"}, {0})


def test_torch_that_traces_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert not is_pippy_available()
    with pytest.raises(RuntimeMisuse, match=r"need torch 2\.7 or later, but torch 2\.6\.0 is installed"):
        build_pipeline(nn.Linear(2, 2), [], (torch.zeros(1, 2),), None, 1)
    monkeypatch.undo()
    assert is_pippy_available()


def test_batch_size_is_that_of_the_first_tensor() -> None:
    assert find_pippy_batch_size((None, {"a": torch.zeros(3, 2)}, torch.zeros(4)), {}) == 3
    assert find_pippy_batch_size((), {"flag": True, "x": torch.zeros(5)}) == 5
    assert find_pippy_batch_size(None, None) is None
    assert find_pippy_batch_size(("text",), {"flag": True}) is None
