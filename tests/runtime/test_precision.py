"""Precision of prepared models: the dtype they compute in, the dtype they return, scaling and fp8."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import AORecipeKwargs, AutocastKwargs, GradScalerKwargs, TERecipeKwargs
from hpcaccel.runtime.parallel import precision
from hpcaccel.runtime.parallel.forward_wrappers import RecomputedForward, recompute, take_off
from hpcaccel.runtime.parallel.precision import to_fp32, unwrap_forward, wrap_forward
from hpcaccel.runtime.training.scaling import make_scaler
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) * scale
        return found


class Pair(NamedTuple):
    logits: torch.Tensor
    name: str


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def test_fp16_overflow_on_one_rank_skips_the_step_on_all() -> None:
    ended = run_ranks("scaled.py")
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    expected = [[[False, False], [True, True], [False, False]], 512.0]
    assert ended.result() == {"ddp": expected, "fsdp": expected}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_wrapped_forward_computes_in_half_and_returns_fp32(precision: str) -> None:
    model = Net()
    inside = []
    model.linear.register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    wrap_forward(model, CPU, precision)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert inside == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    wrap_forward(model, CPU, precision, fp32_outputs=False)
    assert model(torch.ones(1, 2)).dtype == inside[0]
    wrap_forward(model, CPU, precision, handler=AutocastKwargs(enabled=False))
    model(torch.ones(1, 2))
    assert inside[-1] == torch.float32


def test_wrapped_forward_can_be_inspected_copied_pickled_and_removed() -> None:
    model = Net()
    wrap_forward(model, CPU, "bf16")
    wrap_forward(model, CPU, "bf16")  # wrapping again has no effect
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    x = torch.randn(3, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        nn.init.zeros_(other.linear.weight)
        nn.init.zeros_(other.linear.bias)
        assert other(x).abs().sum() == 0, "the copy computes with its own weights"
    unwrap_forward(model)
    assert "forward" not in model.__dict__
    assert torch.equal(model(x), model.linear(x))


def test_wrapped_forward_may_call_itself_and_fail_and_follows_the_cache_setting() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
            if scale < 0:
                raise ValueError(scale)
            return super().forward(x if scale == 2.0 else self(x, 2.0))

    seen: list[tuple[bool, bool]] = []
    model, x = Twice(), torch.ones(1, 2)
    wrap_forward(model, CPU, "bf16")
    first = model(x)
    with pytest.raises(ValueError, match="-1"):
        model(x, -1.0)
    assert torch.equal(model(x), first)
    assert not torch.is_autocast_enabled("cpu")
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(not before)
    try:
        assert torch.equal(model(x), first)
    finally:
        torch.set_autocast_cache_enabled(before)
    assert seen == [(True, before)] * 5 + [(True, not before)] * 2


def test_forward_wrappers_are_removed_one_by_one() -> None:
    model = Net()
    recompute([model])
    wrap_forward(model, CPU, "bf16")
    take_off(model, RecomputedForward)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    unwrap_forward(model)
    assert "forward" not in model.__dict__
    own: Any = lambda x: x  # noqa: E731
    model.forward = own
    wrap_forward(model, CPU, "bf16")
    unwrap_forward(model)
    assert model.forward is own


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor,
        lambda tensor: (tensor, 3),
        lambda tensor: [tensor, None],
        lambda tensor: {"a": tensor, "b": "word"},
        lambda tensor: OrderedDict(a=tensor),
        lambda tensor: Pair(tensor, "x"),
        lambda tensor: Output(tensor),
        lambda tensor: {"deep": [(tensor,)]},
    ],
)
def test_outputs_of_every_type_become_fp32_and_keep_their_type(make: Any) -> None:
    given, expected = make(torch.ones(2, dtype=torch.bfloat16)), make(torch.ones(2))
    found = to_fp32(given)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    whole = torch.ones(2, dtype=torch.int64)
    assert to_fp32(whole) is whole


def test_scaler_is_made_for_fp16_only_and_warns_once_on_a_cpu() -> None:
    assert make_scaler(CPU, "bf16") is None
    with pytest.warns(UserWarning, match="fp16 on a CPU") as warned:
        scaler = make_scaler(CPU, "fp16", GradScalerKwargs(init_scale=8.0))
    assert len(warned) == 1
    assert scaler is not None
    assert scaler.get_scale() == 8.0


def test_fp8_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeMisuse, match=r"fp8 needs a GPU with compute capability 8\.9 .* trains on cpu"):
        precision.refuse_fp8(CPU)
    with pytest.raises(RuntimeMisuse, match="fp8 with TERecipeKwargs is not supported, only fp8 with torchao"):
        precision.refuse_fp8(CPU, TERecipeKwargs())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeMisuse, match=r"A100 has 8\.0"):
        precision.refuse_fp8(torch.device("cuda"), AORecipeKwargs())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(RuntimeMisuse, match="pip install torchao"):
        precision.refuse_fp8(torch.device("cuda"), AORecipeKwargs())
