"""Several Accelerators in one process: which settings they share, and which each has for itself."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from hpcaccel.runtime.parallelism_config import ParallelismConfig
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.states.gradient_state import GradientState

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


LOADING = {
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": True,
    "non_blocking": True,
    "use_stateful_dataloader": True,
}
DEFAULTS = DataLoaderConfiguration()


def test_second_accelerator_has_default_settings() -> None:
    first = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**LOADING),  # type: ignore[arg-type]
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False),
        step_scheduler_with_optimizer=False,
        device_placement=False,
        rng_types=["torch"],
        kwargs_handlers=[AutocastKwargs(enabled=False), DistributedDataParallelKwargs(static_graph=True)],
    )
    second = Accelerator(cpu=True)
    for name, value in LOADING.items():
        assert getattr(first, name) is value
        assert getattr(second, name) == getattr(DEFAULTS, name)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
    assert (first.step_scheduler_with_optimizer, second.step_scheduler_with_optimizer) == (False, True)
    assert (first.device_placement, second.device_placement) == (False, True)
    assert (first.rng_types, second.rng_types) == (["torch"], ["generator"])
    assert first.gradient_state.plugin_kwargs["sync_with_dataloader"] is False
    assert second.gradient_state.plugin_kwargs["sync_with_dataloader"] is True
    assert not first.autocast()._enabled
    assert second._setup.handlers.ddp is None


def test_second_accelerator_may_have_other_settings() -> None:
    Accelerator(cpu=True, even_batches=True, split_batches=False)
    second = Accelerator(cpu=True, even_batches=False, split_batches=True, dispatch_batches=False)
    assert (second.even_batches, second.split_batches, second.dispatch_batches) == (False, True, False)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16'.*already has .*mixed_precision='no'"),
        ({"strategy": "fsdp"}, r"strategy='fsdp'.*already has .*strategy='ddp'"),
        (
            {"parallelism_config": ParallelismConfig(tp_size=2)},
            r"tp_size=2.*the first Accelerator of this process got none",
        ),
    ],
)
def test_second_accelerator_cannot_change_shared_settings(told: dict[str, Any], message: str) -> None:
    Accelerator(cpu=True)
    with pytest.raises(RuntimeMisuse, match=message):
        Accelerator(cpu=True, **told)


def test_each_accelerator_prepares_a_loader_with_its_own_settings() -> None:
    first = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42))
    second = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=43))
    raw = DataLoader(range(32), batch_size=4, shuffle=True)  # type: ignore[arg-type, var-annotated]
    orders = [torch.cat(list(accelerator.prepare(raw))).tolist() for accelerator in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(32))
    assert orders[0] != orders[1]
    with pytest.raises(RuntimeMisuse, match="has already been prepared"):
        first.prepare(raw)


def test_changed_dataloader_config_applies_to_later_loaders() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.even_batches = False
    assert accelerator.prepare(DataLoader(range(3))).even_batches is False  # type: ignore[arg-type]
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=True)
    assert accelerator.prepare(DataLoader(range(3))).even_batches is True  # type: ignore[arg-type]


def trained(accelerator: Accelerator, preparing: Accelerator, micro_batches: int) -> tuple[float, list[bool]]:
    """The weight after ``micro_batches`` with gradient 1 each, and for each whether it was a boundary."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = preparing.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    boundaries = []
    for _ in range(micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            boundaries.append(accelerator.sync_gradients)
    return float(model.weight.detach()), boundaries


def test_each_accelerator_accumulates_independently() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    second = Accelerator(cpu=True)
    assert trained(second, second, 2) == (-2.0, [True, True])
    assert trained(first, first, 4) == (-2.0, [False, True, False, True])
    assert trained(first, first, 1)[1] == [False]  # left in the middle of an accumulation
    assert trained(second, second, 1) == (-1.0, [True])


def test_optimizer_follows_the_accelerator_that_accumulates() -> None:
    """As in a helper function that makes its own Accelerator with the same arguments."""
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert trained(again, first, 4) == (-2.0, [False, True, False, True])


def test_all_accelerators_know_the_active_loader() -> None:
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=8), Accelerator(cpu=True)
    loader = second.prepare(DataLoader(range(3)))  # type: ignore[arg-type]
    ends = []
    for _ in loader:
        assert first.gradient_state.active_dataloader is loader
        with first.accumulate():
            ends.append((first.sync_gradients, GradientState().end_of_dataloader))
    assert ends == [(False, False), (False, False), (True, True)]


def test_gradient_state_reset_restarts_the_micro_batch_count() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with accelerator.accumulate():
        pass
    GradientState._reset_state()
    assert accelerator.sync_gradients
    with accelerator.accumulate():
        assert not accelerator.sync_gradients


def test_unpickled_accelerator_keeps_state_and_settings() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, even_batches=False)
    copy = pickle.loads(pickle.dumps(accelerator))
    assert copy.state.__dict__ == accelerator.state.__dict__
    assert (copy.gradient_accumulation_steps, copy.even_batches) == (3, False)
    assert GradientState().num_steps == 3


def test_accelerator_refuses_to_prepare_after_a_state_reset() -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute.*`AcceleratorState._reset"):
        accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.is_main_process
    accelerator.end_training()
