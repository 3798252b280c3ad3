"""``torch.compile`` before, in and after ``prepare``, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import DynamoBackend
from hpcaccel.runtime.handlers import TorchDynamoPlugin
from hpcaccel.runtime.parallel.compiling import is_compiled, options_of
from hpcaccel.runtime.parallel.ddp import unwrap
from hpcaccel.runtime.parallel.forward_wrappers import recompute

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def made() -> Iterator[list[Accelerator]]:
    accelerators: list[Accelerator] = []
    yield accelerators
    for accelerator in accelerators:
        accelerator.end_training()


def start(made: list[Accelerator], **options: Any) -> Accelerator:
    made.append(Accelerator(cpu=True, **options))
    return made[-1]


def test_prepare_compiles_and_unwrap_model_returns_the_original_module(made: list[Accelerator]) -> None:
    accelerator = start(made, dynamo_backend="eager", mixed_precision="bf16")
    model, x = Net(), torch.randn(3, 4)
    prepared = accelerator.prepare(model)
    assert is_compiled(prepared)
    assert prepared(x).dtype == torch.float32
    assert accelerator.prepare(prepared) is prepared
    with pytest.raises(RuntimeMisuse, match="has already been prepared"):
        accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    again = accelerator.unwrap_model(prepared, keep_torch_compile=True)
    assert is_compiled(again)
    assert accelerator.unwrap_model(again) is model
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert "forward" not in model.__dict__


def test_model_compiled_before_prepare_is_recompiled_around_the_wrappers(made: list[Accelerator]) -> None:
    accelerator = start(made)
    model = Net()
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    prepared = accelerator.prepare(torch.compile(model, backend=backend))
    assert is_compiled(prepared)
    assert accelerator.unwrap_model(prepared) is model
    prepared(torch.randn(3, 4)).sum().backward()
    assert calls


def test_model_compiled_after_prepare_is_unwrapped(made: list[Accelerator]) -> None:
    model = Net()
    prepared = torch.compile(start(made).prepare(model), backend="eager")
    prepared(torch.randn(3, 4))
    assert unwrap(prepared) is model


def test_regional_compilation_compiles_blocks_in_place(made: list[Accelerator]) -> None:
    plugin = TorchDynamoPlugin(backend=DynamoBackend.EAGER, use_regional_compilation=True)
    model = Net()
    prepared = start(made, dynamo_plugin=plugin).prepare(model)
    assert prepared is model
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    with torch.no_grad():
        prepared(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (None, None),
        ("no", None),
        (DynamoBackend.NO, None),
        (TorchDynamoPlugin(), None),
        (DynamoBackend.INDUCTOR, {"regional": False, "backend": "inductor"}),
        (
            TorchDynamoPlugin(backend="EAGER", mode="max-autotune", fullgraph=True, dynamic=False),
            {"regional": False, "backend": "eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False},
        ),
    ],
)
def test_dynamo_settings_become_options_of_torch_compile(wish: Any, expected: dict[str, Any] | None) -> None:
    assert options_of(wish) == expected


def test_spec_enables_compilation_and_unknown_backends_are_rejected() -> None:
    assert options_of(None, setting=True) == {"regional": False}
    with pytest.raises(RuntimeMisuse, match=r"unknown dynamo_backend 'inductr' .* inductor"):
        options_of("inductr")


def test_recompute_runs_forward_twice_and_keeps_gradients_and_names() -> None:
    model = Net()
    names, x = list(model.state_dict()), torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    calls = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    recompute(model.blocks)
    found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert len(calls) == 2
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert list(model.state_dict()) == names
    assert type(model.blocks[0]) is Block
    with pytest.raises(RuntimeMisuse, match="found no blocks in the model"):
        recompute([])
