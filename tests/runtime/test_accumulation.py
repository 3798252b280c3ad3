"""Gradient accumulation: which micro-batches end in an optimizer step, and which reduce gradients over the ranks."""

from __future__ import annotations

import pytest
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.training.accumulation import Accumulation, MicroBatch
from hpcaccel.runtime.training.gradient_sync import NoSync


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


def test_every_third_micro_batch_is_a_boundary() -> None:
    assert boundaries(Accumulation(3), 7) == [False, False, True, False, False, True, False]


def test_is_boundary_is_true_before_the_first_micro_batch() -> None:
    assert Accumulation(3).is_boundary


def test_last_batch_of_the_loader_in_use_is_a_boundary_and_resets_the_count() -> None:
    accumulation, source = Accumulation(3), Source()
    accumulation.loaders.took_batch_from(source)
    boundaries(accumulation, 1)
    source.at_last_batch = True
    assert boundaries(accumulation, 1) == [True]
    source.at_last_batch = False
    assert boundaries(accumulation, 3) == [False, False, True]


def test_unfinished_evaluation_does_not_hide_the_end_of_the_training_loader() -> None:
    accumulation, training, evaluation = Accumulation(3), Source(), Source()
    accumulation.loaders.took_batch_from(training)
    accumulation.loaders.took_batch_from(evaluation)
    accumulation.loaders.took_batch_from(training)
    training.at_last_batch = True
    assert boundaries(accumulation, 1) == [True]
    accumulation.loaders.ended(training)
    assert accumulation.loaders.current is evaluation


def test_last_batch_is_no_boundary_without_sync_with_dataloader() -> None:
    accumulation, source = Accumulation(3, sync_with_dataloader=False), Source()
    accumulation.loaders.took_batch_from(source)
    source.at_last_batch = True
    assert boundaries(accumulation, 4) == [False, False, True, False]


def test_two_models_of_a_gan_accumulate_independently() -> None:
    accumulation, first, second = Accumulation(2), nn.Linear(1, 1), nn.Linear(1, 1)
    found = []
    for _ in range(4):
        for model in (first, second):
            with MicroBatch(accumulation, (model,)):
                found.append(accumulation.is_boundary)
    assert found == [False, False, True, True] * 2


def test_set_steps_takes_effect_at_once_and_rejects_invalid_values() -> None:
    accumulation = Accumulation(4)
    assert boundaries(accumulation, 2) == [False, False]
    accumulation.set_steps(2)
    assert boundaries(accumulation, 3) == [True, False, True]
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(RuntimeMisuse, match="gradient_accumulation_steps="):
            accumulation.set_steps(wrong)  # type: ignore[arg-type]


class Synced(nn.Module):
    """A model that records whether its gradients would be reduced over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = True
        self.__dict__["_hpcaccel_no_sync"] = NoSync(lambda on: setattr(self, "shares", on))


def test_gradient_sync_is_off_until_the_boundary_and_on_after_an_exception() -> None:
    accumulation, models = Accumulation(3), (Synced(), Synced())
    for expected in (False, False, True):
        with MicroBatch(accumulation, models):
            assert [model.shares for model in models] == [expected, expected]
            assert accumulation.inside == 1
        assert all(model.shares for model in models)

    def fails() -> None:
        with MicroBatch(accumulation, models):
            assert not models[0].shares
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert all(model.shares for model in models)
    assert accumulation.inside == 0


def test_sync_each_batch_reduces_gradients_in_every_micro_batch() -> None:
    accumulation, model = Accumulation(3, sync_each_batch=True), Synced()
    with MicroBatch(accumulation, (model,)):
        assert model.shares
        assert not accumulation.is_boundary


def test_nested_micro_batches_restore_gradient_sync_on_exit() -> None:
    accumulation, outer, inner = Accumulation(2), Synced(), Synced()
    with MicroBatch(accumulation, (outer,)):
        with MicroBatch(accumulation, (inner, outer)):
            assert not inner.shares
        assert inner.shares
        assert not outer.shares
    assert outer.shares
