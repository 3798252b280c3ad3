"""Settings from the environment of programs started by torchrun or ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin
from hpcaccel.runtime.launch_env import fsdp_plugin, settings_from_env
from hpcaccel.runtime.parallel.fsdp_choices import choose
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.states.accelerator_state import AcceleratorState

from .ranks import make_run

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"HPCACCEL_STRATEGY": "fsdp"}, {"strategy": "fsdp"}),
        ({"ACCELERATE_USE_FSDP": "true"}, {"strategy": "fsdp"}),
        ({"ACCELERATE_USE_FSDP": "false"}, {}),
        ({"ACCELERATE_USE_FSDP": "true", "HPCACCEL_STRATEGY": "ddp"}, {"strategy": "ddp"}),
        (
            {"ACCELERATE_MIXED_PRECISION": "BF16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            {"mixed_precision": "bf16", "gradient_accumulation_steps": 4},
        ),
    ],
)
def test_settings_are_read_from_the_environment(environ: dict[str, str], expected: dict[str, Any]) -> None:
    assert settings_from_env(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HPCACCEL_STRATEGY": "zero3"}, r"HPCACCEL_STRATEGY='zero3'.*ddp, fsdp"),
        ({"ACCELERATE_USE_FSDP": "maybe"}, r"ACCELERATE_USE_FSDP='maybe'.*is not a boolean"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "two"}, "non-negative integer"),
    ],
)
def test_invalid_environment_values_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        settings_from_env(environ)


def test_fsdp_variables_fill_unset_plugin_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VERSION": "1",
        "SHARDING_STRATEGY": "2",
        "OFFLOAD_PARAMS": "true",
        "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "TRANSFORMER_CLS_TO_WRAP": "Block, Other",
        "MIN_NUM_PARAMS": "1000",
        "ACTIVATION_CHECKPOINTING": "yes",
        "IGNORED_MODULES": "out.*",
    }.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    plugin = fsdp_plugin(None, wanted=True)
    assert plugin is not None
    assert (plugin.fsdp_version, plugin.sharding_strategy, plugin.cpu_offload) == (1, "SHARD_GRAD_OP", True)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Other"]
    assert (plugin.min_num_params, plugin.ignored_modules) == (1000, "out.*")
    choices = choose(Settings(), plugin)
    assert choices.reshard_after_forward is False
    assert choices.activation_checkpointing
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")  # overrides FSDP_SHARDING_STRATEGY
    assert choose(Settings(), fsdp_plugin(None, wanted=True)).reshard_after_forward is True
    told = FullyShardedDataParallelPlugin(reshard_after_forward=False, cpu_offload=False)
    filled = fsdp_plugin(told, wanted=True)
    assert choose(Settings(), filled)[1] is False
    assert choose(Settings(), filled).cpu_offload is False
    assert filled is not None
    assert filled.min_num_params == 1000
    assert fsdp_plugin(None, wanted=False) is None


@pytest.mark.parametrize("name", ["SHARDING_STRATEGY", "AUTO_WRAP_POLICY", "OFFLOAD_PARAMS", "MIN_NUM_PARAMS"])
def test_invalid_fsdp_variable_is_named_in_the_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FSDP_{name}", "nonsense")
    with pytest.raises(RuntimeMisuse, match=f"FSDP_{name}='nonsense'"):
        fsdp_plugin(None, wanted=True)


def test_environment_variable_turns_on_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type is DistributedType.FSDP
    assert accelerator.state.fsdp_plugin.reshard_after_forward is False
    assert type(accelerator.prepare(nn.Linear(2, 2))).__name__ == "FSDPLinear"
    assert Accelerator(cpu=True).is_fsdp2
    accelerator.end_training()


def test_strategy_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_STRATEGY", "fsdp")
    accelerator = Accelerator(cpu=True, strategy="ddp")
    assert not accelerator.is_fsdp2
    assert accelerator.state.fsdp_plugin is None


def test_strategy_variable_is_ignored_in_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setenv("HPCACCEL_RUN_DIR", str(run.path))
    monkeypatch.setenv("HPCACCEL_STRATEGY", "fsdp")
    assert not Accelerator(cpu=True).is_fsdp2


@pytest.mark.parametrize("in_a_run", [True, False])
def test_fsdp_variables_fill_the_scripts_plugin_only_outside_a_run(
    in_a_run: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if in_a_run:
        monkeypatch.setenv("HPCACCEL_RUN_DIR", str(make_run(tmp_path / "run").path))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    accelerator = Accelerator(cpu=True, strategy="fsdp", fsdp_plugin=FullyShardedDataParallelPlugin())
    assert accelerator.state.fsdp_plugin.cpu_offload is (None if in_a_run else True)
    accelerator.end_training()
