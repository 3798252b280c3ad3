"""fp8 layers: torchao's with the real package, TransformerEngine's with a stand-in."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat import availability, fp8_layers
from hpcaccel.utils import (
    FP8RecipeKwargs,
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    has_ao_layers,
    has_transformer_engine_layers,
)

pytestmark = pytest.mark.torch


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 24), nn.Linear(24, 32, bias=False))
    return nn.Sequential(nn.Linear(32, 32), inner, nn.Linear(32, 32), nn.Linear(32, 32))


# -- torchao


def test_torchao_layers_leave_out_the_first_the_last_and_odd_sizes() -> None:
    pytest.importorskip("torchao")
    model = layers()
    assert not has_ao_layers(model)
    expected = model(torch.ones(16, 32))
    convert_model_to_fp8_ao(model)
    assert has_ao_layers(model)
    converted = [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]
    assert converted == ["1.0", "2"]
    found = model(torch.ones(16, 32))
    assert 0 < (found - expected).norm() / expected.norm() < 0.1
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_torchao_layers_are_chosen_by_a_filter() -> None:
    torchao = pytest.importorskip("torchao.float8")
    model = layers()
    convert_model_to_fp8_ao(model, torchao.Float8LinearConfig(), lambda module, name: name == "3")
    assert [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"] == ["3"]


def test_filter_knows_the_first_and_last_layer_of_a_model() -> None:
    model = layers()
    names = ["0", "1.0", "2", "3"]
    assert [filter_first_and_last_linear_layers(model, name) for name in names] == [False, True, True, False]
    assert not filter_first_and_last_linear_layers(model[1][2], "1.2")
    assert filter_first_and_last_linear_layers(model[1][0], "1.0")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "found", lambda package: False)
    with pytest.raises(ImportError, match="has_ao_layers needs torchao, which is not installed: pip install torchao"):
        has_ao_layers(layers())
    message = r"needs transformer_engine, which is not installed: pip install 'transformer_engine\[pytorch\]'"
    for call in (
        lambda: convert_model(layers()),
        lambda: has_transformer_engine_layers(layers()),
        lambda: contextual_fp8_autocast(nn.Identity().forward, None),
        lambda: apply_fp8_autowrap(layers(), None),
    ):
        with pytest.raises(ImportError, match=message) as raised:
            call()
        assert isinstance(raised.value, RuntimeMisuse)


# -- TransformerEngine


class TeLinear(nn.Module):
    """As TransformerEngine's: no subclass of ``nn.Linear``, ``params_dtype`` instead of ``dtype``, an empty bias for
    none."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype))
        self.bias: Any = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.empty(0)

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(found, self.weight, self.bias if self.bias.numel() else None)


class TeLayerNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-5, params_dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))
        self.bias = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(found, self.weight.shape, self.weight, self.bias, self.eps)


class Engine:
    """What the stand-in was called with."""

    def __init__(self) -> None:
        self.contexts: list[tuple[bool, Any]] = []
        self.mxfp8 = (True, "")

    @contextmanager
    def fp8_autocast(self, enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        self.contexts.append((enabled, fp8_recipe))
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()

    def recipe(kind: str) -> Any:
        return lambda **fields: SimpleNamespace(kind=kind, **fields)

    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".pytorch": {
            "Linear": TeLinear,
            "LayerNorm": TeLayerNorm,
            "TransformerLayer": type("TransformerLayer", (nn.Module,), {}),
            "fp8_autocast": made.fp8_autocast,
        },
        ".pytorch.fp8": {"check_mxfp8_support": lambda: made.mxfp8},
        ".common": {},
        ".common.recipe": {
            "Format": SimpleNamespace(HYBRID="<hybrid>", E4M3="<e4m3>", E5M2="<e5m2>"),
            "DelayedScaling": recipe("delayed"),
            "MXFP8BlockScaling": recipe("blocks"),
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(f"transformer_engine{name}")
        vars(module).update(attributes)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    known = availability.found
    monkeypatch.setattr(availability, "found", lambda package: package == "transformer_engine" or known(package))
    return made


def test_model_is_converted_to_transformer_engine_and_back(engine: Engine) -> None:
    model = layers()
    expected = model(torch.ones(2, 32))
    assert not has_transformer_engine_layers(model)
    model[1][1].eval()
    convert_model(model)
    assert has_transformer_engine_layers(model)
    kinds = [type(part).__name__ for part in model.modules() if not isinstance(part, nn.Sequential)]
    assert kinds == ["TeLinear", "TeLinear", "TeLayerNorm", "Linear", "Linear", "TeLinear", "TeLinear"]
    assert torch.equal(model(torch.ones(2, 32)), expected)
    assert not model[1][1].training
    assert model[0].training
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert torch.equal(model(torch.ones(2, 32)), expected)
    assert model[0].weight.requires_grad


def test_kinds_of_layers_are_chosen(engine: Engine) -> None:
    model = layers()
    convert_model(model, _convert_linear=False)
    assert [type(part).__name__ for part in model.modules() if "Te" in type(part).__name__] == ["TeLayerNorm"]
    model = nn.Sequential(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16), nn.LayerNorm(16))
    convert_model(model, _convert_ln=False)
    assert [type(part).__name__ for part in model] == ["TeLinear", "LayerNorm"]
    assert model[0].weight.dtype == torch.bfloat16
    convert_model(model, to_transformer_engine=False)
    assert model[0].bias is None


def test_forward_runs_under_fp8_in_training_only(engine: Engine) -> None:
    model = layers()
    expected = model(torch.ones(2, 32))
    recipe = TERecipeKwargs(fp8_format="e4m3", amax_history_len=8)
    assert apply_fp8_autowrap(model, recipe) is model
    assert apply_fp8_autowrap(model, recipe) is model  # once, however often it is called
    assert torch.equal(model(torch.ones(2, 32)), expected)
    ((enabled, found),) = engine.contexts
    assert enabled
    assert (found.kind, found.fp8_format, found.amax_history_len) == ("delayed", "<e4m3>", 8)
    copied = copy.deepcopy(model)
    model.eval()(torch.ones(2, 32))
    copied(torch.ones(2, 32))
    assert [one for one, _ in engine.contexts] == [True, False, True]
    apply_fp8_autowrap(model, TERecipeKwargs(use_autocast_during_eval=True))(torch.ones(2, 32))
    assert engine.contexts[-1][0]
    apply_fp8_autowrap(model, None)
    apply_fp8_autowrap(model, FP8RecipeKwargs(backend="TE", fp8_format="HYBRID"))


def test_function_for_a_class_is_wrapped(engine: Engine) -> None:
    model = nn.Linear(2, 2)
    bound = model.forward
    forward = contextual_fp8_autocast(bound, "<recipe>", use_during_eval=True)
    assert forward.__wrapped__ == bound  # type: ignore[attr-defined]
    assert torch.equal(forward(model.eval(), torch.ones(2)), bound(torch.ones(2)))
    assert engine.contexts == [(True, "<recipe>")]


def test_block_scaling_needs_the_hardware_and_fitting_fields(engine: Engine) -> None:
    model = apply_fp8_autowrap(layers(), TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1))
    model(torch.ones(2, 32))
    assert engine.contexts[0][1] == SimpleNamespace(kind="blocks", margin=1)
    with pytest.raises(RuntimeMisuse, match="cannot be combined with amax_history_len"):
        apply_fp8_autowrap(layers(), TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4))
    with pytest.raises(RuntimeMisuse, match="fp8_format='e3m4': use one of HYBRID, E4M3, E5M2"):
        apply_fp8_autowrap(layers(), TERecipeKwargs(fp8_format="e3m4"))
    engine.mxfp8 = (False, "compute capability 9.0")
    with pytest.raises(RuntimeMisuse, match=r"this device has no MXFP8: compute capability 9\.0"):
        apply_fp8_autowrap(layers(), TERecipeKwargs(use_mxfp8_block_scaling=True))


def test_intel_package_is_used_on_hpus(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("intel_transformer_engine")
    vars(package).update(Linear=TeLinear, fp8_autocast=engine.fp8_autocast)
    monkeypatch.setitem(sys.modules, "intel_transformer_engine", package)
    monkeypatch.setattr(fp8_layers, "is_available", lambda name: name == "hpu")
    monkeypatch.setattr(availability, "found", lambda package: package == "intel_transformer_engine")
    model = layers()
    convert_model(model)
    assert has_transformer_engine_layers(model)
    assert type(model[1][1]) is nn.LayerNorm  # the package has none
