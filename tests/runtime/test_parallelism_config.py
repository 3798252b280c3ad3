"""The sizes of the mesh: ``ParallelismConfig``, its handlers and variables, and the layout of the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.mesh_layout import MeshLayout, arrange
from hpcaccel.runtime.launch_env import parallelism_config
from hpcaccel.runtime.parallelism_config import ParallelismConfig, TorchContextParallelConfig
from hpcaccel.runtime.settings import Settings

pytestmark = pytest.mark.torch


def handlers(config: ParallelismConfig | None) -> SimpleNamespace:
    return SimpleNamespace(parallelism=config, tensor_parallel=None, fsdp=None)


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        (Settings(), ParallelismConfig(cp_size=4), MeshLayout(2, 1, 1, 4)),
        (Settings(strategy="fsdp"), ParallelismConfig(cp_size=2), MeshLayout(1, 4, 1, 2)),
        (Settings(strategy="fsdp"), ParallelismConfig(cp_size=2, tp_size=2), MeshLayout(1, 2, 2, 2)),
        (Settings(strategy="fsdp"), ParallelismConfig(cp_size=2, dp_replicate_size=4), MeshLayout(4, 1, 1, 2)),
        (Settings(strategy="fsdp", context_parallel_size=8), None, MeshLayout(1, 1, 1, 8)),
        (Settings(strategy="deepspeed"), ParallelismConfig(sp_size=2, dp_shard_size=4), MeshLayout(8, 1)),
    ],
)
def test_eight_ranks_are_arranged(settings: Settings, config: ParallelismConfig | None, expected: MeshLayout) -> None:
    found = arrange(8, 2, settings, handlers(config))
    assert found == expected
    assert found.of_model == MeshLayout(found.replicate, found.shard * found.context, found.tensor)


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (Settings(), ParallelismConfig(cp_size=3), "8 ranks cannot be arranged as cp=3:"),
        (Settings(context_parallel_size=4), ParallelismConfig(cp_size=2), "conflicting context-parallel sizes"),
        (Settings(strategy="deepspeed"), ParallelismConfig(cp_size=2), r"DeepSpeed splits .*sp_size=2"),
        (Settings(strategy="fsdp"), ParallelismConfig(sp_size=2), "but the strategy is fsdp. Pass .*deepspeed_plugin"),
        (Settings(strategy="deepspeed"), ParallelismConfig(sp_size=2, dp_shard_size=2), "as dp_shard=2, sp=2:"),
        (Settings(strategy="deepspeed"), ParallelismConfig(sp_size=3), "8 ranks cannot be arranged as sp=3:"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: Settings, config: ParallelismConfig, message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        arrange(8, 2, settings, handlers(config))


def test_strategy_of_an_unused_handler_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="cp_handler=.* has no effect"):
        arrange(1, 1, Settings(), handlers(ParallelismConfig(cp_handler=TorchContextParallelConfig())))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cp_size": 0}, "cp_size must be at least 1"),
        ({"cp_size": 2, "sp_size": 2}, "Set one of them to 1"),
        ({"cp_backend": "ring"}, "cp_backend must be 'torch'"),
        ({"sp_backend": "torch"}, "sp_backend must be 'deepspeed'"),
        ({"cp_size": 2, "cp_handler": "allgather"}, "pass a TorchContextParallelConfig"),
    ],
)
def test_configuration_that_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        ParallelismConfig(**given)
    with pytest.raises(RuntimeMisuse, match="'ring' is not a valid value"):
        TorchContextParallelConfig("ring")


def test_configuration_has_the_sizes_and_names_of_its_dimensions() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4, tp_size=5)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (120, 6, 20)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    unset = ParallelismConfig()
    assert (unset.total_size, unset.cp_enabled, unset.active_mesh_dims) == (1, False, [])
    assert unset.build_device_mesh("cpu") is None
    with pytest.raises(RuntimeMisuse, match="Pass a device type"):
        unset.get_device_mesh()


def test_unset_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "8")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    for config in (ParallelismConfig(), parallelism_config({
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "8",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
    })):  # fmt: skip
        assert config is not None
        assert config.cp_size == 8
        assert config.cp_handler == TorchContextParallelConfig("alltoall")
    assert ParallelismConfig(cp_size=1).cp_size == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "many")
    with pytest.raises(RuntimeMisuse, match="PARALLELISM_CONFIG_CP_SIZE='many' must be a whole number"):
        ParallelismConfig()
    monkeypatch.setenv("HPCACCEL_RUN_DIR", "/a/run")
    assert ParallelismConfig().cp_size is None, "the sizes of a run come from its spec"


def test_launcher_may_choose_the_size_and_with_it_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "8")
    with pytest.raises(RuntimeMisuse, match=r"1 rank cannot be arranged as cp=8:"):
        Accelerator(cpu=True)
