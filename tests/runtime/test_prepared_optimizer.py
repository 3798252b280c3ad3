"""Prepared optimizers: steps at accumulation boundaries, access to the user's optimizer, fp16 scaling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.optimizer import AcceleratedOptimizer
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.scaling import Scaling


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def sgd(*parameters: nn.Parameter, **options: Any) -> PreparedOptimizer:
    accumulation = options.pop("accumulation", None) or Accumulation(1)
    return PreparedOptimizer(torch.optim.SGD(parameters, lr=1.0), accumulation, **options)


def test_optimizer_steps_and_clears_gradients_at_boundaries_only(weight: nn.Parameter) -> None:
    accumulation, steps = Accumulation(2), list[int]()
    optimizer = sgd(weight, accumulation=accumulation, on_step=lambda: steps.append(1))
    weight.grad = torch.ones(2)
    accumulation.begin_micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    assert (weight.tolist(), weight.grad.tolist(), steps) == ([1, 1], [1, 1], [])
    accumulation.begin_micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    assert (weight.tolist(), weight.grad, steps) == ([0, 0], None, [1])


def test_prepared_optimizer_exposes_the_users_optimizer(weight: nn.Parameter) -> None:
    optimizer = sgd(weight)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, AcceleratedOptimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == optimizer.optimizer.state_dict()
    assert optimizer.defaults is optimizer.optimizer.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2
    other = sgd(weight, nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(optimizer.state_dict())
    assert optimizer.scaler is None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_step_hooks_of_a_prepared_optimizer_run(weight: nn.Parameter) -> None:
    optimizer, seen = sgd(weight), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert seen == ["before", "after"]


def test_zero_grad_passes_on_only_the_given_arguments(weight: nn.Parameter) -> None:
    class Plain(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad(set_to_none=False)

    weight.grad = torch.ones(2)
    sgd(weight).zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [0, 0]
    PreparedOptimizer(Plain([weight]), Accumulation(1)).zero_grad()
    assert weight.grad.tolist() == [0, 0]
    sgd(weight).zero_grad()
    assert weight.grad is None


def test_closure_may_be_called_several_times_per_step(weight: nn.Parameter) -> None:
    optimizer = PreparedOptimizer(torch.optim.LBFGS([weight], max_iter=4), Accumulation(1))
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == 8.0
    assert len(losses) > 1
    assert weight.tolist() == pytest.approx([3, 3])


def test_train_and_eval_reach_optimizers_that_have_modes(weight: nn.Parameter) -> None:
    class ScheduleFree(torch.optim.SGD):
        mode = ""

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    optimizer = PreparedOptimizer(ScheduleFree([weight]), Accumulation(1))
    optimizer.train()
    assert optimizer.mode == "train"
    optimizer.eval()
    assert optimizer.mode == "eval"
    sgd(weight).train()
    sgd(weight).eval()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_copied_optimizer_steps_its_own_parameters_uncounted(
    weight: nn.Parameter, copied: Callable[[Any], Any]
) -> None:
    steps: list[int] = []
    optimizer = sgd(weight, on_step=lambda: steps.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step in a function
    twin = copied(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
            twin.step()
            assert parameter.tolist() == [0, 0]
    assert (weight.tolist(), steps) == ([1, 1], [])


# -- fp16 --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scaling() -> Scaling:
    return Scaling(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000))


def backward(scaling: Scaling, *weights: nn.Parameter, gradient: float = 1.0) -> None:
    loss = torch.stack([(weight * gradient).sum() for weight in weights]).sum()
    scaling.scale(loss).backward()  # type: ignore[no-untyped-call]


def test_overflow_skips_the_step_and_is_reported(weight: nn.Parameter, scaling: Scaling) -> None:
    steps: list[int] = []
    optimizer = sgd(weight, scaling=scaling, on_step=lambda: steps.append(1))
    for gradient, skipped, left in ((float("inf"), True, 1.0), (1.0, False, 0.0), (float("nan"), True, 0.0)):
        backward(scaling, weight, gradient=gradient)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped
        assert weight.tolist() == [left, left]
    assert steps == [1, 1, 1]
    assert scaling.scaler.get_scale() == 1.0
    assert optimizer.scaler is scaling.scaler


def test_overflow_in_one_optimizer_skips_only_that_optimizer(scaling: Scaling) -> None:
    bad, good = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = sgd(bad, scaling=scaling), sgd(good, scaling=scaling)
    for _ in range(2):
        backward(scaling, bad, gradient=float("inf"))
        backward(scaling, good)
        for optimizer in (first, second):
            scaling.unscale(optimizer.optimizer)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert (bad.item(), good.item()) == (1.0, -1.0)
    assert scaling.scaler.get_scale() == 1.0  # halved once per step, not once per optimizer


def test_gradients_of_two_optimizers_are_unscaled_once(scaling: Scaling) -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [sgd(weight, scaling=scaling) for weight in weights]
    backward(scaling, *weights)
    for optimizer in optimizers:
        scaling.unscale(optimizer.optimizer)
        scaling.unscale(optimizer.optimizer)
    for optimizer in optimizers:
        optimizer.step()
    assert [weight.item() for weight in weights] == [0, 0]


def test_two_optimizers_can_alternate_as_in_a_gan(scaling: Scaling) -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [sgd(weight, scaling=scaling) for weight in weights]
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            backward(scaling, weight, gradient=0.25)
            scaling.unscale(optimizer.optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert [weight.item() for weight in weights] == [0.5, 0.5]


def test_gradients_are_unscaled_again_after_an_omitted_step(weight: nn.Parameter, scaling: Scaling) -> None:
    optimizer = sgd(weight, scaling=scaling)
    backward(scaling, weight)
    scaling.unscale(optimizer.optimizer)
    weight.grad = None  # instead of the optimizer's zero_grad
    backward(scaling, weight)
    scaling.unscale(optimizer.optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]
    optimizer.step()
    assert weight.tolist() == [0, 0]


def test_step_method_is_restored_after_a_scaled_step(weight: nn.Parameter, scaling: Scaling) -> None:
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = PreparedOptimizer(inner, Accumulation(1), scaling=scaling)
    backward(scaling, weight)
    optimizer.step()
    assert "step" not in inner.__dict__
    torch.optim.lr_scheduler.StepLR(inner, 1)
    around = inner.step
    backward(scaling, weight)
    optimizer.step()
    assert inner.step is around


def test_skipped_step_of_a_fused_optimizer_is_detected(weight: nn.Parameter, scaling: Scaling) -> None:
    optimizer = PreparedOptimizer(torch.optim.SGD([weight], lr=1.0, fused=True), Accumulation(1), scaling=scaling)
    for gradient, skipped in ((float("inf"), True), (1.0, False)):
        backward(scaling, weight, gradient=gradient)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped
    assert weight.tolist() == [0, 0]


def test_closure_with_fp16_is_refused(weight: nn.Parameter, scaling: Scaling) -> None:
    with pytest.raises(RuntimeMisuse, match=r"SGD.step\(closure\) with mixed_precision=fp16"):
        sgd(weight, scaling=scaling).step(lambda: 0.0)
