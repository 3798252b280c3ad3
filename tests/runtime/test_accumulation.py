"""Which micro-batches end in an optimizer step, and what happens in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcaccel.runtime.accumulation import Accumulation
from hpcaccel.runtime.optim import PreparedOptimizer, PreparedScheduler


class Source:
    trains = False

    def __init__(self) -> None:
        self.at_last_batch = False


def boundaries(accumulation: Accumulation, count: int) -> list[bool]:
    found = []
    for _ in range(count):
        accumulation.begin_micro_batch()
        found.append(accumulation.is_boundary)
    return found


def test_every_third() -> None:
    assert boundaries(Accumulation(3), 7) == [False, False, True, False, False, True, False]


def test_outside_of_accumulation_every_step_counts() -> None:
    assert Accumulation(3).is_boundary


def test_the_last_batch_of_the_loader_in_use_is_a_boundary_and_counting_begins_anew() -> None:
    accumulation, source = Accumulation(3), Source()
    accumulation.took_batch_from(source)
    boundaries(accumulation, 1)
    source.at_last_batch = True
    assert boundaries(accumulation, 1) == [True]
    source.at_last_batch = False
    assert boundaries(accumulation, 3) == [False, False, True]


def test_an_evaluation_that_was_left_half_way_does_not_hide_the_end_of_the_training_loader() -> None:
    accumulation, training, evaluation = Accumulation(3), Source(), Source()
    accumulation.took_batch_from(training)
    accumulation.took_batch_from(evaluation)
    accumulation.took_batch_from(training)
    training.at_last_batch = True
    assert boundaries(accumulation, 1) == [True]
    accumulation.ended(training)
    assert accumulation.current is evaluation


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def optimizer_of(weight: nn.Parameter, accumulation: Accumulation, steps: list[int]) -> PreparedOptimizer:
    return PreparedOptimizer(
        torch.optim.SGD([weight], lr=1.0), accumulation, scaler=None, on_step=lambda: steps.append(1)
    )


def test_an_optimizer_steps_and_forgets_at_boundaries_only(weight: nn.Parameter) -> None:
    accumulation, steps = Accumulation(2), list[int]()
    optimizer = optimizer_of(weight, accumulation, steps)
    weight.grad = torch.ones(2)
    accumulation.begin_micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    assert (weight.tolist(), weight.grad.tolist(), steps) == ([1, 1], [1, 1], [])
    accumulation.begin_micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    assert (weight.tolist(), weight.grad, steps) == ([0, 0], None, [1])


def test_a_prepared_optimizer_is_an_optimizer_and_shows_the_users_own(weight: nn.Parameter) -> None:
    optimizer = optimizer_of(weight, Accumulation(1), [])
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == optimizer.optimizer.state_dict()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    optimizer.step()
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(("repeats", "expected"), [(1, 0.5), (2, 0.25)])
def test_a_scheduler_steps_with_its_optimizer_as_often_as_was_said(
    weight: nn.Parameter, repeats: int, expected: float
) -> None:
    accumulation = Accumulation(2)
    optimizer = optimizer_of(weight, accumulation, [])
    inner = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, gamma=0.5)
    schedule = PreparedScheduler(inner, [optimizer], accumulation, repeats=repeats)
    weight.grad = torch.ones(2)
    for _ in range(2):
        accumulation.begin_micro_batch()
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [expected]


def test_a_scheduler_waits_when_the_optimizer_was_skipped(weight: nn.Parameter) -> None:
    accumulation = Accumulation(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = PreparedOptimizer(torch.optim.SGD([weight], lr=1.0), accumulation, scaler=scaler, on_step=lambda: None)
    schedule = PreparedScheduler(
        torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, gamma=0.5), [optimizer], accumulation, repeats=1
    )
    for gradient, lr in ((float("inf"), 1.0), (4.0, 0.5)):
        scaler.scale(weight.sum())
        weight.grad = torch.full((2,), gradient)
        optimizer.step()
        schedule.step()
        assert optimizer.step_was_skipped == (gradient == float("inf"))
        assert schedule.get_last_lr() == [lr]
