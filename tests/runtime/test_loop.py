"""Status of a rank's training loop: its phase, and the line at which the script left the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.health.heartbeat import RankStatus
from hpcaccel.runtime.states.accelerator_state import AcceleratorState

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:nothing will be saved")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Training:
    """A training on one rank with six batches per epoch."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            model, optimizer, DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=1)
        )

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(1, 1)).sum())
        self.optimizer.step()

    def an_epoch(self, *, until: int) -> None:
        for index, _ in enumerate(self.batches):
            self.step()
            if index == until:
                break

    @property
    def status(self) -> RankStatus:
        return self.accelerator._session.loop.context.status


def epochs_to_their_end(training: Training) -> None:
    for _ in training.accelerator.epochs(2):
        training.an_epoch(until=2)


def steps_to_their_end(training: Training) -> None:
    training.an_epoch(until=2)
    for _ in training.accelerator.steps(5):
        training.step()


def another_epoch(training: Training) -> None:
    training.an_epoch(until=2)
    for _ in training.batches:
        pass


def steps_of_its_own(training: Training) -> None:
    for step in training.accelerator.steps(5):
        training.step()
        if step == 2:
            break
    training.step()


@pytest.mark.parametrize("train", [epochs_to_their_end, steps_to_their_end, another_epoch, steps_of_its_own])
def test_left_loop_is_cleared_when_training_continues(train: Callable[[Training], None]) -> None:
    training = Training()
    train(training)
    assert training.status.left_at is None


def test_left_loop_is_kept_through_an_evaluation_and_a_checkpoint() -> None:
    training = Training()
    training.an_epoch(until=2)
    for _ in training.accelerator.prepare(DataLoader(TensorDataset(torch.ones(2, 1)))):  # an evaluation
        pass
    training.accelerator.checkpoint()
    assert (training.status.left_at or "").startswith("tests/runtime/test_loop.py:")


def test_training_step_after_the_steps_loop_ends_phase_finishing() -> None:
    training = Training()
    for _ in training.accelerator.steps(3):
        training.step()
    assert training.status.phase == "finishing"
    training.accelerator.checkpoint()
    assert training.status.phase == "finishing"
    training.step()
    training.accelerator.checkpoint()
    assert (training.status.phase, training.status.first_step) == ("training", 4)


def checkpoint(training: Training) -> None:
    training.step()
    training.accelerator.checkpoint()


@pytest.mark.parametrize("train", [epochs_to_their_end, steps_to_their_end, steps_of_its_own, checkpoint])
def test_warning_that_nothing_is_saved_names_the_line_of_the_script(train: Callable[[Training], None]) -> None:
    with pytest.warns(UserWarning, match="nothing will be saved") as found:
        train(Training())
    assert [one.filename for one in found] == [__file__]
