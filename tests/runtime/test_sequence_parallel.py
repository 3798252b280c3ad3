"""DeepSpeed's sequence parallelism behind ``prepare``, with a stand-in for DeepSpeed's modules.

tests/integrations/test_sequence_parallel.py trains with the real package.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.deepspeed import auto_values, sequence_parallel
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
from hpcaccel.runtime.deepspeed.sequence_parallel import adapt_loader, replace_attention
from hpcaccel.runtime.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Reader(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.config.get_text_config = lambda: self.config


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of DeepSpeed's functions, in order."""
    found: list[Any] = []
    package, ulysses, groups = (ModuleType(name) for name in ("deepspeed", "ulysses_sp", "parallel_state_sp"))

    class UlyssesSPAttentionHF:
        @classmethod
        def register_with_transformers(cls, *, disable_in_eval: bool = False, **given: Any) -> str:
            found.append({**given, "disable_in_eval": disable_in_eval})
            return "groups"

    class UlyssesSPDataLoaderAdapter:
        def __init__(self, dl: Any, **given: Any) -> None:
            self.iter = iter(dl)
            found.append(given)

    package.init_distributed = lambda **given: found.append(given)  # type: ignore[attr-defined]
    ulysses.UlyssesSPAttentionHF = UlyssesSPAttentionHF  # type: ignore[attr-defined]
    ulysses.UlyssesSPDataLoaderAdapter = UlyssesSPDataLoaderAdapter  # type: ignore[attr-defined]
    groups.get_sequence_parallel_rank = lambda: 1  # type: ignore[attr-defined]
    groups.get_sequence_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
    groups.get_sequence_parallel_group = lambda: "group"  # type: ignore[attr-defined]
    folder = "deepspeed.runtime.sequence_parallel"
    for name, module in (
        ("deepspeed", package),
        (f"{folder}.ulysses_sp", ulysses),
        (f"{folder}.parallel_state_sp", groups),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sequence_parallel, "_replaced", False)
    return found


def test_attention_is_replaced_once_and_loaders_are_adapted(calls: list[Any]) -> None:
    with pytest.raises(RuntimeMisuse, match="prepare the model first"):
        adapt_loader([1], CPU)
    model = Reader(_attn_implementation="sdpa")
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False)
    config = ParallelismConfig(sp_size=2, sp_handler=handler)
    assert replace_attention(model, config, samples=3) == "groups"
    assert calls[0] == {"auto_mpi_discovery": False}
    assert calls[1] == {
        "model_name_or_path": model,
        "core_attn_implementation": "sdpa",
        "sequence_parallel_size": 2,
        "micro_batch_size": 3,
        "seq_length": 64,
        "seq_length_is_variable": False,
        "disable_in_eval": True,
    }
    assert next(adapt_loader([7], CPU).iter) == 7
    assert calls[2] == {"sp_rank": 1, "sp_group": "group", "sp_world_size": 2, "device": CPU}
    with pytest.raises(RuntimeMisuse, match="forms its groups only once"):
        replace_attention(model, config, samples=3)
    assert len(calls) == 3


def test_release_without_disable_in_eval_is_called_without_it(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(
        model_name_or_path: nn.Module,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
    ) -> str:
        return "older groups"

    name = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setattr(sys.modules[name].UlyssesSPAttentionHF, "register_with_transformers", register)
    model = Reader(_attn_implementation="sdpa")
    assert replace_attention(model, ParallelismConfig(sp_size=2), samples=3) == "older groups"


@pytest.mark.parametrize(
    ("model", "named", "message"),
    [
        (nn.Linear(1, 1), None, "needs a model of transformers"),
        (Reader(_attn_implementation="eager"), None, r"attn_implementation='flash_attention_2'\), or 'sdpa'"),
        (Reader(_attn_implementation="sdpa"), "flash_attention_2", "sp_attn_implementation is 'flash_attention_2'"),
        (
            Reader(_attn_implementation="sdpa", layer_types=["linear_attention"]),
            None,
            "layers of kind linear_attention",
        ),
    ],
)
def test_model_that_cannot_be_split_is_refused(calls: list[Any], model: nn.Module, named: Any, message: str) -> None:
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=named)
    with pytest.raises(RuntimeMisuse, match=message):
        replace_attention(model, ParallelismConfig(sp_size=2, sp_handler=handler), samples=1)
    assert not calls


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.sequence_parallel.ulysses_sp", None)
    with pytest.raises(RuntimeMisuse, match=r"needs deepspeed>=0\.18\.2"):
        adapt_loader([1], CPU)


def test_batch_counts_once_for_the_ranks_that_split_it() -> None:
    session = SimpleNamespace(
        group=SimpleNamespace(world_size=8), handlers=SimpleNamespace(parallelism=ParallelismConfig(sp_size=4))
    )
    setup: Any = SimpleNamespace(session=session, settings=SimpleNamespace(split_batches=False))
    parts = auto_values.EngineParts(batch_sizes=[3])
    plugin = DeepSpeedPlugin(zero_stage=1)
    found = dict(auto_values._sizes(setup, plugin, parts, 5))
    assert found == {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 3 * 5 * 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sp_seq_length_is_variable": False}, "needs the length: set sp_seq_length"),
        ({"sp_attn_implementation": "eager"}, "'eager': DeepSpeed cannot split its sequences"),
        ({"sp_attn_implementation": "a/b"}, "'a/b': DeepSpeed cannot split"),
    ],
)
def test_invalid_configuration_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        DeepSpeedSequenceParallelConfig(**given)


def test_configuration_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "kernels-community/flash-attn2")
    config = ParallelismConfig()
    assert config.sp_enabled
    assert config.sp_handler == DeepSpeedSequenceParallelConfig(128, False, "kernels-community/flash-attn2")
    assert config.build_device_mesh("cpu") is None, "DeepSpeed forms its own groups"
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "None")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "true")
    assert DeepSpeedSequenceParallelConfig().sp_seq_length is None
