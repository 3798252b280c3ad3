"""The program that builds a model on the meta device, in this process, which has imported torch already."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parents[2] / "hpcaccel" / "launch" / "parameter_program.py"
FACTORY = """\
import torch
from torch import nn

class Config:
    hidden_size = 8
    def __init__(self):
        self.num_layers = 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.inner = nn.Linear(2, 3, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.ones(4))

class Family:
    @staticmethod
    def small():
        print("building")
        return Model()

def pair():
    return {"a": nn.Linear(2, 2), "b": nn.Linear(3, 3, bias=False), "rate": 0.1}

def reads_values():
    return nn.Linear(2, 2).weight.sum().item()

def needs_arguments(size):
    return nn.Linear(size, size)

def number():
    return 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("parameter_program_here", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "factory_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "factory_here", raising=False)
    return module


def built(program: ModuleType, place: str) -> dict[str, Any]:
    found: dict[str, Any] = program.described(program.from_factory(place), place)
    return found


def test_tensors_have_shapes_types_and_kinds(program: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert built(program, "factory_here:Family.small") == {
        "tensors": [
            ["inner.weight", [3, 2], "bfloat16", "trained"],
            ["inner.bias", [3], "bfloat16", "trained"],
            ["scale", [4], "float32", "buffer"],
        ],
        "config": {"num_layers": 2},
        "class": "Model",
    }
    assert capfd.readouterr().out == "", "the result alone is on stdout"


def test_several_models_are_counted_together(program: ModuleType) -> None:
    names = [name for name, *_ in built(program, "factory_here:pair")["tensors"]]
    assert names == ["0.weight", "0.bias", "1.weight"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_values", "factory_here:reads_values() failed on the meta device: RuntimeError"),
        (
            "needs_arguments",
            "missing 1 required positional argument: 'size'. The function must build the model",
        ),
        ("number", "factory_here:number returned int, not a torch.nn.Module"),
    ],
)
def test_function_without_a_model_ends_the_program(
    program: ModuleType, capfd: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        built(program, f"factory_here:{name}")
    assert message in capfd.readouterr().err
