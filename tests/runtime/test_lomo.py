"""LOMO, with the real package: updates in the backward pass, and errors where it cannot work."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.training.lomo import LomoOptimizer
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch

lomo_optim = pytest.importorskip("lomo_optim")

INPUTS = torch.linspace(-1, 1, 32).view(8, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(INPUTS) - INPUTS.sum(1, keepdim=True)).pow(2).mean()


def accelerator(path: Path, **options: Any) -> Accelerator:
    return Accelerator(cpu=True, project_dir=path, **options)


def test_training_equals_plain_gradient_descent(tmp_path: Path) -> None:
    expected, model = network(), network()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    accelerated = accelerator(tmp_path)
    assert not accelerated.has_lomo_optimizer
    optimizer: Any = lomo_optim.Lomo(model, lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerated.prepare(model, optimizer, scheduler)
    assert accelerated.has_lomo_optimizer
    for step in range(4):
        if step % 2:
            accelerated.lomo_backward(loss_of(model), scheduler.get_last_lr()[0])
        else:
            accelerated.backward(loss_of(model), learning_rate=scheduler.get_last_lr()[0])
        assert all(parameter.grad is None for parameter in model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a scheduler that steps before its optimizer
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(expected).backward()
        plain.step()
        plain_scheduler.step()
        assert accelerated.step == step + 1
        for found, right in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, right)
    accelerated.end_training()


def test_norm_is_clipped_by_the_optimizer_itself(tmp_path: Path) -> None:
    model, expected = network(), network()
    accelerated = accelerator(tmp_path)
    model, optimizer = accelerated.prepare(model, lomo_optim.Lomo(model, lr=0.1, clip_grad_norm=0.01))
    loss = loss_of(model)
    optimizer.grad_norm(loss)
    accelerated.backward(loss, learning_rate=0.1)
    loss_of(expected).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    with torch.no_grad():
        for found, right in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, right - 0.1 * right.grad)  # type: ignore[operator]
    for call in (accelerated.clip_grad_norm_, accelerated.clip_grad_value_):
        message = rf"{call.__name__}\(\): Lomo has used and freed the gradients .* Pass clip_grad_norm"
        with pytest.raises(RuntimeMisuse, match=message):
            call(model.parameters(), 1.0)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    assert accelerated.clip_grad_norm_(other.parameters(), 1.0) > 1
    accelerated.end_training()


def test_training_is_resumed(tmp_path: Path) -> None:
    model = network()
    accelerated = accelerator(tmp_path)
    model, optimizer = accelerated.prepare(model, lomo_optim.Lomo(model, lr=0.1))
    accelerated.backward(loss_of(model), learning_rate=0.1)
    optimizer.step()
    accelerated.save_state()
    saved = copy.deepcopy(model.state_dict())
    accelerated.backward(loss_of(model), learning_rate=0.1)
    assert not torch.equal(model.state_dict()["0.weight"], saved["0.weight"])
    accelerated.load_state()
    assert accelerated.step == 1
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    accelerated.end_training()


def test_wrong_calls_are_errors(tmp_path: Path) -> None:
    accelerated = accelerator(tmp_path)
    model: Any = network()
    plain = accelerated.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not isinstance(plain, LomoOptimizer)
    with pytest.raises(ValueError, match=r"learning_rate=0\.1\) needs a LOMO optimizer, and none was prepared"):
        accelerated.backward(loss_of(model), learning_rate=0.1)
    accelerated.end_training()
    accelerated = accelerator(tmp_path)
    model, optimizer = accelerated.prepare(model, lomo_optim.Lomo(model, lr=0.1))
    with pytest.raises(RuntimeMisuse, match=r"Lomo\.step\(\): .* call accelerator\.backward\(loss, learning_rate="):
        optimizer.step()
    with pytest.raises(RuntimeMisuse, match=r"Lomo\.step\(closure\)"):
        optimizer.step(lambda: loss_of(model))
    with pytest.raises(ValueError, match="needs the learning rate of the step"):
        accelerated.lomo_backward(loss_of(model), None)  # type: ignore[arg-type]
    before = copy.deepcopy(model.state_dict())
    accelerated.gradient_accumulation_steps = 2
    with pytest.raises(RuntimeMisuse, match=r"cannot be accumulated \(gradient_accumulation_steps=2\)"):
        accelerated.backward(loss_of(model), learning_rate=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeMisuse, match=r"prepare\(Lomo\): there are several LOMO optimizers"):
        accelerated.prepare(lomo_optim.Lomo(network()))
    assert accelerated.prepare(optimizer) is optimizer
    accelerated.end_training()


@pytest.mark.filterwarnings("ignore:mixed_precision=fp16 on a CPU")
def test_fp16_and_sharding_are_errors(tmp_path: Path) -> None:
    for options, message in (
        ({"mixed_precision": "fp16"}, "does not use the gradient scaler of mixed_precision=fp16. Use bf16"),
        ({"strategy": "fsdp"}, "This training has 1 ranks and strategy='fsdp'. Use another optimizer"),
    ):
        accelerated = accelerator(tmp_path, **options)
        model = network()
        with pytest.raises(RuntimeMisuse, match=re.escape(message)):
            accelerated.prepare(model, lomo_optim.Lomo(model))
        accelerated.end_training()


SEVERAL_RANKS = """\
import sys
from types import SimpleNamespace
from torch import nn, optim
from hpcaccel import Accelerator
class Lomo(optim.SGD): pass
sys.modules["lomo_optim"] = SimpleNamespace(Lomo=Lomo, AdaLomo=Lomo)  # the package's own import takes seconds
accelerator = Accelerator(cpu=True)
model = nn.Linear(2, 2)
try:
    accelerator.prepare(model, Lomo(model.parameters()))
except ValueError as error:
    print("refused:", error)
accelerator.end_training()
"""


def test_several_ranks_are_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SEVERAL_RANKS)
    ended = run_ranks(str(program), [])
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert all("refused: prepare(Lomo): " in output and "has 2 ranks" in output for output in ended.outputs)
