"""Prepared schedulers of every kind: when they step and how often. Warnings are errors here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.accumulation import Accumulation, MicroBatch
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler, prepare_scheduler
from hpcaccel.runtime.training.scaling import Scaling
from hpcaccel.scheduler import AcceleratedScheduler


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def optimizer_of(weight: nn.Parameter, accumulation: Accumulation | None = None, **options: Any) -> PreparedOptimizer:
    weight.grad = torch.ones(2)
    return PreparedOptimizer(torch.optim.SGD([weight], lr=1.0), accumulation or Accumulation(1), **options)


def halving(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


@pytest.mark.parametrize(("repeats", "expected"), [(1, 0.5), (2, 0.25)])
def test_scheduler_steps_repeats_times_per_optimizer_step(weight: nn.Parameter, repeats: int, expected: float) -> None:
    accumulation = Accumulation(2)
    optimizer = optimizer_of(weight, accumulation)
    schedule = PreparedScheduler(halving(optimizer.optimizer), [optimizer], accumulation, repeats=repeats)
    for _ in range(2):
        accumulation.begin_micro_batch()
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [expected]
    assert isinstance(schedule, AcceleratedScheduler)


def test_scheduler_does_not_step_when_the_optimizer_step_was_skipped(weight: nn.Parameter) -> None:
    scaling = Scaling(torch.amp.GradScaler("cpu", init_scale=4.0))
    optimizer = optimizer_of(weight, scaling=scaling)
    schedule = PreparedScheduler(halving(optimizer.optimizer), [optimizer], Accumulation(1))
    for gradient, lr in ((float("inf"), 1.0), (4.0, 0.5)):
        scaling.scale(weight.sum())
        weight.grad = torch.full((2,), gradient)
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [lr]


@pytest.mark.parametrize("on", ["the user's", "the prepared"])
def test_scheduler_on_raw_or_prepared_optimizer_sets_the_rate_of_both(weight: nn.Parameter, on: str) -> None:
    optimizer = optimizer_of(weight)
    schedule = PreparedScheduler(
        halving(optimizer if on == "the prepared" else optimizer.optimizer), [optimizer], Accumulation(1)
    )
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert weight.tolist() == [0, 0]


def test_step_wrapped_by_a_later_scheduler_is_called(weight: nn.Parameter) -> None:
    optimizer = optimizer_of(weight)
    optimizer.step()
    inner = halving(optimizer.optimizer)
    optimizer.step()
    inner.step()  # torch would warn if it had not seen the step
    assert optimizer.param_groups[0]["lr"] == 0.5


KINDS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeats", [1, 2])
def test_prepared_schedule_matches_the_plain_one(weight: nn.Parameter, kind: str, repeats: int) -> None:
    """A one-cycle schedule stays at its last value."""
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    expected = KINDS[kind](plain)
    optimizer = optimizer_of(weight)
    schedule = PreparedScheduler(KINDS[kind](optimizer.optimizer), [optimizer], Accumulation(1), repeats=repeats)
    for number in range(8):
        optimizer.step()
        schedule.step()
        for _ in range(repeats):
            if kind != "one cycle" or expected.last_epoch < 5:
                plain.step()
                expected.step()
        assert schedule.get_last_lr() == expected.get_last_lr(), number
    assert schedule.state_dict().keys() == expected.state_dict().keys()


def test_state_dict_is_that_of_the_users_scheduler(weight: nn.Parameter) -> None:
    optimizer = optimizer_of(weight)
    schedule = PreparedScheduler(halving(optimizer.optimizer), [optimizer], Accumulation(1))
    for _ in range(3):
        optimizer.step()
        schedule.step()
    other = PreparedScheduler(halving(optimizer_of(weight)), [], Accumulation(1))
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == [0.125]
    assert (other.last_epoch, other.gamma) == (3, 0.5)


def test_plateau_scheduler_counts_evaluations(weight: nn.Parameter) -> None:
    accumulation = Accumulation(4)
    optimizer = optimizer_of(weight, accumulation)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.5)
    schedule = PreparedScheduler(plateau, [optimizer], accumulation, repeats=1)
    with MicroBatch(accumulation, ()):
        schedule.step(1.0)  # in a micro-batch without a step: ignored
    assert plateau.last_epoch == 0
    for metric in (1.0, 2.0):  # after an epoch, at any point of the accumulation
        schedule.step(metric)
    assert (plateau.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.5)


def test_custom_scheduler_class_is_stepped_and_saved(weight: nn.Parameter) -> None:
    class Own:
        steps = 0

        def step(self) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

    schedule = PreparedScheduler(Own(), [], Accumulation(1), repeats=3)
    schedule.step()
    assert schedule.state_dict() == {"steps": 3}


# -- settings of a session ---------------------------------------------------------------------------------------------


def prepared(optimizer: PreparedOptimizer, scheduler: Any, **settings: Any) -> tuple[PreparedScheduler, list[str]]:
    logged: list[str] = []
    session = SimpleNamespace(
        group=SimpleNamespace(world_size=4),
        optimizers=[optimizer],
        loop=SimpleNamespace(context=SimpleNamespace(log_once=logged.append)),
    )
    setup = SimpleNamespace(session=session, settings=Settings(**settings), accumulation=optimizer._parts.accumulation)
    return prepare_scheduler(setup, scheduler), logged  # type: ignore[arg-type]


def steps_of(weight: nn.Parameter, **settings: Any) -> tuple[int, list[str]]:
    optimizer = optimizer_of(weight, Accumulation(2))
    schedule, logged = prepared(optimizer, halving(optimizer.optimizer), **settings)
    for _ in range(2):
        with MicroBatch(optimizer._parts.accumulation, ()):
            optimizer.step()
            schedule.step()
    return schedule.last_epoch, logged


def test_scheduler_steps_once_per_process_by_default_and_logs_it(weight: nn.Parameter) -> None:
    steps, logged = steps_of(weight)
    assert steps == 4
    assert "steps 4 times" in logged[0]
    assert "step_scheduler_per_process=False" in logged[0]


def test_scheduler_steps_once_with_split_batches_or_on_request(weight: nn.Parameter) -> None:
    assert steps_of(weight, split_batches=True) == (1, [])
    assert steps_of(weight, step_scheduler_per_process=False) == (1, [])


def test_scheduler_without_its_optimizer_steps_on_every_call(weight: nn.Parameter) -> None:
    assert steps_of(weight, step_scheduler_with_optimizer=False) == (2, [])


def test_scheduler_of_unknown_optimizer_follows_all_optimizers(weight: nn.Parameter) -> None:
    scaling = Scaling(torch.amp.GradScaler("cpu", init_scale=4.0))
    optimizer = optimizer_of(weight, scaling=scaling)
    own = SimpleNamespace(steps=0)
    own.step = lambda: setattr(own, "steps", own.steps + 1)
    schedule, _ = prepared(optimizer, own, step_scheduler_per_process=False)
    for gradient in (float("inf"), 1.0):
        scaling.scale(weight.sum())
        weight.grad = torch.full((2,), gradient)
        optimizer.step()
        schedule.step()
    assert own.steps == 1
