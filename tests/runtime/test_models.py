"""Model sizes, tied parameters and wrappers; saving and loading without an Accelerator; the progress bar."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import rank_logger
from hpcaccel.runtime.compat import introspection, standalone
from hpcaccel.runtime.distributed.world import World

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9 // 8),
        ("1.5KiB", 1536),
        ("2 MB", 2 * 10**6),
        ("20B", 20),
        (7, 7),
        ("12", 12),
        ("1TB", 10**12),
    ],
)
def test_file_sizes_are_parsed(text: Any, expected: int) -> None:
    assert introspection.convert_file_size_to_int(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "5XB", "five GB", "-1GB"])
def test_invalid_file_size_is_refused(text: str) -> None:
    with pytest.raises(RuntimeMisuse, match="is not a size"):
        introspection.convert_file_size_to_int(text)


def test_byte_counts_are_formatted() -> None:
    assert [introspection.convert_bytes(size) for size in (10, 2048, 3 * 2**30)] == ["10 bytes", "2.0 KB", "3.0 GB"]


def test_module_sizes_are_computed() -> None:
    model = Tied()
    sizes = introspection.compute_module_sizes(model)
    assert sizes["embed.weight"] == 80
    assert sizes["body.0"] == 4 * 4 * 4 + 4 * 4
    assert sizes["body.1"] == 2 * 16 + 2 * 16 + 8
    assert sizes["mask"] == 3 / 8
    assert sizes[""] == 80 + sizes["body"] + 3 / 8  # tied weights count once
    half = introspection.compute_module_sizes(model, dtype=torch.float16)
    assert half["embed"] == 40
    assert half["body.1.num_batches_tracked"] == 8
    assert introspection.compute_module_sizes(model, special_dtypes={"embed.weight": torch.int8})["embed"] == 20
    assert set(introspection.compute_module_sizes(model, buffers_only=True)) >= {"", "mask", "body.1.running_mean"}
    total, (largest, names) = introspection.calculate_maximum_sizes(model)
    assert (total, largest, names) == (sizes[""], 80, ["embed", "body.0"])


def test_tensors_of_a_module_are_listed() -> None:
    model = Tied()
    assert [name for name, _ in introspection.named_module_tensors(model)] == ["mask"]
    names = [name for name, _ in introspection.named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert "mask" not in names
    assert "body.1.running_mean" in names
    assert [name for name, _ in introspection.named_module_tensors(model.head, include_buffers=False)] == ["weight"]
    one, other = model.embed.weight, model.head.weight.detach()[1:]
    assert introspection.id_tensor_storage(one) == introspection.id_tensor_storage(other)


def test_tied_parameters_are_found_and_tied_again() -> None:
    model = Tied()
    assert introspection.find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert introspection.find_tied_parameters(nn.Linear(1, 1)) == []
    model.head.weight = nn.Parameter(torch.empty(5, 4, device="meta"))
    introspection.retie_parameters(model, [["head.weight", "embed.weight"]])
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device.type == "cpu"


def test_child_modules_come_before_their_parents() -> None:
    model = Tied()
    order = [name for name, _ in introspection.get_module_children_bottom_up(model, return_fqns=True)]
    assert order == ["embed", "body.0", "body.1", "body", "head", ""]
    assert introspection.get_module_children_bottom_up(model)[-1] is model


def test_compiled_and_parallel_wrappers_are_detected_and_removed() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert not introspection.is_compiled_module(model)
    assert not introspection.has_compiled_regions(model)
    assert not introspection.model_has_dtensor(model)
    assert not introspection.is_peft_model(model)
    compiled: Any = torch.compile(model, backend="eager")
    assert introspection.is_compiled_module(compiled)
    assert introspection.has_compiled_regions(nn.Sequential(compiled))
    assert standalone.extract_model_from_parallel(compiled) is model
    assert standalone.extract_model_from_parallel(nn.DataParallel(model)) is model


def test_compile_regions_keeps_the_output() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    x = torch.ones(1, 2)
    expected = blocks(x)
    assert standalone.compile_regions(blocks, backend="eager") is blocks
    assert torch.equal(blocks(x), expected)
    single = nn.Linear(2, 2)
    assert introspection.is_compiled_module(standalone.compile_regions(single, backend="eager"))


def test_save_and_load_work_without_an_accelerator(tmp_path: Path) -> None:
    standalone.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert standalone.load(tmp_path / "a.pt")["a"].tolist() == [1, 1]
    torch.save(ZeroDivisionError(), tmp_path / "b.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        standalone.load(tmp_path / "b.pt")
    assert isinstance(standalone.load(tmp_path / "b.pt", weights_only=False), ZeroDivisionError)


def test_progress_bar_is_shown_by_one_process_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[list[int], bool]] = []

    def bar(items: list[int], disable: bool) -> list[int]:
        shown.append((items, disable))
        return items

    fake = ModuleType("tqdm.auto")
    fake.tqdm = bar  # type: ignore[attr-defined]
    monkeypatch.setattr(World, "_current", None)
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", fake)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    rank_logger.tqdm([1])
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    rank_logger.tqdm([2])
    rank_logger.tqdm([3], main_process_only=False)
    rank_logger.tqdm([4], main_process_only=False, disable=True)
    assert shown == [([1], False), ([2], True), ([3], False), ([4], True)]
    with pytest.raises(RuntimeMisuse, match="main_process_only=True"):
        rank_logger.tqdm(True, [5])
