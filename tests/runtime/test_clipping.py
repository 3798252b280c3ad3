"""Gradient clipping: scaled, accumulated and sharded gradients, and subsets of the parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import process_group, rank_env
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.clipping import clip_norm, clip_value, unscale
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.scaling import Scaling
from tests.runtime.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_over_all_ranks_is_correct_for_every_gradient_layout(size: int) -> None:
    ended = run_ranks("clipping.py", size=size)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    assert ended.result() == {"done": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [2.0, 1, float("inf")])
@pytest.mark.parametrize("largest", [0.5, 1e9])
def test_plain_gradients_are_clipped_to_the_bit_as_by_torch(dtype: torch.dtype, order: float, largest: float) -> None:
    def parameters() -> list[nn.Parameter]:
        numbers = torch.Generator().manual_seed(7)
        made = [nn.Parameter(torch.zeros(size, 3, dtype=dtype)) for size in (1, 5, 300)]
        for one in made[:2] if order == 1 else made:
            one.grad = torch.randn(one.shape, generator=numbers).to(dtype)
        return made

    ours, theirs = parameters(), parameters()
    norm = clip_norm(session_of(), ours, max_norm=largest, norm_type=order)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, largest, order))
    pairs = [(one.grad, two.grad) for one, two in zip(ours, theirs, strict=True)]
    assert all((one is None and two is None) or torch.equal(one, two) for one, two in pairs)


def test_gradients_of_several_types_are_clipped_together() -> None:
    weights = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    assert clip_norm(session_of(), weights, max_norm=3.0, norm_type=2).item() == pytest.approx(6.0)
    assert [weight.grad.tolist() for weight in weights] == [pytest.approx([1.5, 1.5])] * 2


@pytest.fixture
def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(2)]


def session_of(*optimizers: torch.optim.Optimizer, scale: float | None = None, steps: int = 1) -> Any:
    scaling = None if scale is None else Scaling(torch.amp.GradScaler("cpu", init_scale=scale))
    prepared = SimpleNamespace(optimizers=list(optimizers))
    session = SimpleNamespace(group=process_group.join(rank_env.ALONE, torch.device("cpu")))
    return SimpleNamespace(accumulation=Accumulation(steps), scaling=scaling, prepared=prepared, session=session)


def backward(session: Any, weights: list[nn.Parameter], gradient: float) -> None:
    loss = torch.stack([weight.sum() for weight in weights]).sum() * gradient
    if session.scaling is not None:
        loss = session.scaling.scale(loss)
    loss.backward()


def gradients(weights: list[nn.Parameter]) -> list[list[float]]:
    return [weight.grad.tolist() for weight in weights if weight.grad is not None]


def test_fp16_gradients_are_unscaled_once_before_clipping(weights: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(weights, lr=1.0)
    session = session_of(optimizer, scale=1024.0)
    backward(session, weights, 3.0)
    assert clip_norm(session, weights, max_norm=100.0, norm_type=2).item() == pytest.approx(6.0)
    assert clip_norm(session, weights, max_norm=3.0, norm_type=2).item() == pytest.approx(6.0)
    unscale(session)
    clip_value(session, weights, limit=1.0)
    assert gradients(weights) == [[1.0, 1.0]] * 2
    session.scaling.step(optimizer, None)
    assert weights[0].tolist() == [-1.0, -1.0]


def test_clipping_unscales_only_the_optimizers_of_the_given_parameters(weights: list[nn.Parameter]) -> None:
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    session = session_of(*optimizers, scale=8.0)
    backward(session, weights, 1.0)
    clip_norm(session, weights[0], max_norm=100.0, norm_type=2)
    assert gradients(weights) == [[1.0, 1.0], [8.0, 8.0]]
    unscale(session, PreparedOptimizer(optimizers[1], session.accumulation))
    assert gradients(weights) == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(RuntimeMisuse, match=r"unscale_gradients\(SGD"):
        unscale(session, torch.optim.SGD(weights, lr=1.0))


@pytest.mark.parametrize("scale", [None, 16.0])
def test_between_boundaries_gradients_are_unchanged_and_the_norm_is_returned(
    weights: list[nn.Parameter], scale: float | None
) -> None:
    session = session_of(torch.optim.SGD(weights, lr=1.0), scale=scale, steps=2)
    session.accumulation.begin_micro_batch()
    backward(session, weights, 1.0)
    before = gradients(weights)
    assert clip_norm(session, weights, max_norm=0.1, norm_type=2).item() == pytest.approx(2.0)
    clip_value(session, weights, limit=0.1)
    unscale(session)
    assert gradients(weights) == before


def test_clip_norm_returns_the_norm_and_clips_like_torch(weights: list[nn.Parameter]) -> None:
    session = session_of(torch.optim.SGD(weights, lr=1.0))
    backward(session, weights, 1.0)
    norm = clip_norm(session, (weight for weight in weights), max_norm=1.0, norm_type=2)
    assert norm.item() == pytest.approx(2.0)
    assert torch.tensor(gradients(weights)).norm().item() == pytest.approx(1.0)
    assert clip_norm(session, weights, max_norm=1.0, norm_type=float("inf")).item() == pytest.approx(0.5)
