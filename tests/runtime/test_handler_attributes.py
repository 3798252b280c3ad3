"""What a script reads from its Accelerator, and may set: the kwargs handlers, ``native_amp``, fp8, the trigger."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.accelerator_setup import Setup
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
)
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.states.accelerator_state import AcceleratorState

from .ranks import run_ranks

pytestmark = pytest.mark.torch

KINDS: dict[str, type[KwargsHandler]] = {
    "autocast_handler": AutocastKwargs,
    "ddp_handler": DistributedDataParallelKwargs,
    "profile_handler": ProfileKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "ao_recipe_handler": AORecipeKwargs,
    "te_recipe_handler": TERecipeKwargs,
    "msamp_recipe_handler": MSAMPRecipeKwargs,
    "fp8_recipe_handler": FP8RecipeKwargs,
}
REPLACEABLE = {"autocast_handler", "ddp_handler", "profile_handler"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_FP8_BACKEND", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", KINDS)
def test_handler_of_the_constructor_is_read_under_its_own_name_only(name: str) -> None:
    handler = KINDS[name]()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    found = {other: getattr(accelerator, other) for other in KINDS}
    assert found.pop(name) is handler
    assert set(found.values()) == {None}
    assert accelerator.has_fp8_handler is ("recipe" in name)


def test_subclass_of_a_handler_counts_as_the_handler() -> None:
    class Own(TERecipeKwargs):
        pass

    accelerator = Accelerator(cpu=True, kwargs_handlers=[Own(margin=3)])
    assert accelerator.te_recipe_handler.margin == 3
    assert accelerator.fp8_recipe_handler is None


@pytest.mark.parametrize("name", KINDS)
def test_only_handlers_that_are_used_later_can_be_replaced(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    handler = KINDS[name]()
    if name not in REPLACEABLE:
        with pytest.raises(
            RuntimeMisuse, match=rf"{name} = .* has no effect.*kwargs_handlers=\[{KINDS[name].__name__}"
        ):
            setattr(accelerator, name, handler)
        assert getattr(accelerator, name) is None
        return
    setattr(accelerator, name, handler)
    assert getattr(accelerator, name) is handler
    with pytest.raises(RuntimeMisuse, match=f"assign a {KINDS[name].__name__}, or None"):
        setattr(accelerator, name, GradScalerKwargs())
    setattr(accelerator, name, None)
    assert getattr(accelerator, name) is None


def test_replaced_handler_is_used_by_what_follows_and_by_the_next_training() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    other = Accelerator(cpu=True)
    assert accelerator.autocast()._enabled
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert not accelerator.autocast()._enabled
    assert other.autocast()._enabled
    other.end_training()
    model = accelerator.prepare(nn.Linear(2, 2))
    assert not accelerator.autocast_handler.enabled
    assert model(torch.ones(1, 2)).dtype is torch.float32
    accelerator.autocast_handler.enabled = True  # in place
    assert accelerator.autocast()._enabled


def test_copied_accelerator_has_the_handlers_and_native_amp() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    accelerator.ddp_handler = DistributedDataParallelKwargs(static_graph=True)
    accelerator.native_amp = True
    twin = pickle.loads(pickle.dumps(accelerator))
    assert twin.scaler_handler.init_scale == 4.0
    assert twin.ddp_handler.static_graph
    assert twin.native_amp


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "expected"), [("no", False), ("bf16", True), ("fp16", True)])
@pytest.mark.filterwarnings("ignore:mixed_precision=fp16 on a CPU")
def test_native_amp_says_whether_models_compute_under_autocast(precision: str, expected: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    assert accelerator.native_amp is expected
    assert accelerator.autocast()._enabled is expected
    assert dtype_inside(accelerator) is ({"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32))
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler, accelerator.delayed_fp8_autocast) == (False,) * 3


def test_deepspeeds_engine_computes_without_autocast() -> None:
    fixed = Settings(strategy="deepspeed", mixed_precision="bf16")
    setup: Any = SimpleNamespace(native_amp_override=None, _fixed=fixed)
    assert Setup.native_amp.fget(setup) is False  # type: ignore[attr-defined]
    setup._fixed = Settings(strategy="fsdp", mixed_precision="bf16")
    assert Setup.native_amp.fget(setup) is True  # type: ignore[attr-defined]


def test_script_turns_autocast_off_and_on() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.native_amp = False
    assert not accelerator.autocast()._enabled
    assert dtype_inside(accelerator) is torch.float32
    assert accelerator.mixed_precision == "bf16"
    accelerator.native_amp = True
    assert dtype_inside(accelerator) is torch.bfloat16


def test_autocast_without_mixed_precision_has_torchs_default_dtype() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = True
    assert dtype_inside(accelerator) is torch.get_autocast_dtype("cpu")
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")


def dtype_inside(accelerator: Accelerator) -> torch.dtype:
    """The dtype of a prepared model's hidden values. Its outputs are fp32."""
    seen = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert accelerator.prepare(model)(torch.ones(1, 2)).dtype is torch.float32
    return seen[0]


def test_fp8_without_a_recipe_is_that_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.runtime.training_session.refuse_fp8", lambda device, handler=None: None)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.fp8_enabled
    assert accelerator.native_amp
    assert accelerator.has_fp8_handler
    assert accelerator.ao_recipe_handler == AORecipeKwargs()
    assert accelerator.te_recipe_handler is None
    assert accelerator.fp8_backend == "AO"
    assert not accelerator.delayed_fp8_autocast
    second = Accelerator(cpu=True)
    assert second.fp8_backend == "AO"


@pytest.mark.parametrize(
    ("recipe", "kind", "expected"),
    [
        (TERecipeKwargs, DistributedType.MULTI_GPU, True),
        (TERecipeKwargs, DistributedType.FSDP, True),
        (TERecipeKwargs, DistributedType.NO, False),
        (MSAMPRecipeKwargs, DistributedType.MULTI_GPU, False),
    ],
)
def test_delayed_fp8_autocast(recipe: type[KwargsHandler], kind: DistributedType, expected: bool) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[recipe()])
    accelerator.state.distributed_type = kind
    assert accelerator.delayed_fp8_autocast is expected


# -- prepared optimizers and schedulers -------------------------------------------------------------------------------


def test_prepared_optimizer_and_scheduler_show_the_states() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, split_batches=True)
    newer = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(raw, 1)
    _, optimizer, scheduler = accelerator.prepare(model, raw, schedule, device_placement=[True, False, True])
    assert optimizer.gradient_state.num_steps == scheduler.gradient_state.num_steps == 3
    assert optimizer.accelerator_state.distributed_type is DistributedType.NO
    assert optimizer.device_placement is False
    assert (scheduler.split_batches, scheduler.step_with_optimizer) == (True, True)
    other = newer.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), device_placement=True)
    assert other.gradient_state.num_steps == 1
    assert other.device_placement is True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_copied_optimizer_shows_the_newest_accelerators_state(copied: Any) -> None:
    model = nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    Accelerator(cpu=True, gradient_accumulation_steps=5)
    twin = copied(optimizer)
    assert (optimizer.gradient_state.num_steps, twin.gradient_state.num_steps) == (3, 5)
    assert twin.accelerator_state.num_processes == 1
    assert twin.device_placement is True


# -- others -----------------------------------------------------------------------------------------------------------


def test_flag_tensor_is_this_processs_trigger() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    assert not accelerator.check_trigger()
    assert state_of(accelerator.flag_tensor) == (0, "cpu", ())
    accelerator.set_trigger()
    assert state_of(accelerator.flag_tensor) == (1, "cpu", ())
    assert accelerator.check_trigger()
    assert state_of(accelerator.flag_tensor) == (0, "cpu", ())
    accelerator.flag_tensor = torch.tensor(1)
    assert accelerator.check_trigger()
    accelerator.flag_tensor = None
    assert accelerator.flag_tensor is None
    assert not accelerator.check_trigger()


def state_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    assert tensor is not None
    return int(tensor), tensor.device.type, tuple(tensor.shape)


def test_pipeline_parallel_rank_is_an_error_with_a_remedy() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(NotImplementedError, match="tp_size"):
        _ = accelerator.pipeline_parallel_rank
    with pytest.raises(RuntimeMisuse):
        _ = accelerator.pipeline_parallel_rank


def test_on_two_ranks() -> None:
    ended = run_ranks("shown_attributes.py", size=2)
    assert ended.codes == [0, 0], ended.outputs
    assert ended.result() == {
        "ddp": [True, False],
        "triggers": [[0, 1], [True, True], [0, 0]],
        "rates": {"per process": 0.25, "split": 0.125, "every call": 0.0625},
        "states": ["MULTI_CPU", 2, True],
    }
