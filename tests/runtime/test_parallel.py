"""prepare() on one rank and on several: the device mesh, FSDP's choices, models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator, init_empty_weights
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.mesh_layout import MeshLayout, arrange
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from hpcaccel.runtime.parallel.fsdp_choices import choose, dtype_of, ignored_parameters
from hpcaccel.runtime.parallel.wrapping import blocks, owned_alone
from hpcaccel.runtime.parallelism_config import ParallelismConfig
from hpcaccel.runtime.settings import Settings
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


def test_prepare_checks_pass_on_two_ranks() -> None:
    ended = run_ranks("prepared.py")
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert len(ended.result()["passed"]) > 9


def test_the_outermost_module_is_gathered_until_its_backward_pass() -> None:
    ended = run_ranks("sharded_root.py")
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    frees, keeps = ended.result()["True"], ended.result()["False"]
    assert frees["with"] == [True, False]
    assert frees["without"] == [True, True]
    assert keeps["with"] == keeps["without"] == [False, False]
    assert max(frees["difference"], keeps["difference"]) < 1e-6


def handlers(**given: object) -> SimpleNamespace:
    return SimpleNamespace(**{"parallelism": None, "tensor_parallel": None, "fsdp": None, **given})


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (Settings(), {}, MeshLayout(8, 1, 1)),
        (Settings(strategy="fsdp"), {}, MeshLayout(1, 8, 1)),
        (Settings(strategy="fsdp", fsdp_shard_size=4), {}, MeshLayout(2, 4, 1)),
        (Settings(strategy="fsdp"), {"parallelism": ParallelismConfig(dp_replicate_size=4)}, MeshLayout(4, 2, 1)),
        (
            Settings(strategy="fsdp"),
            {"parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)},
            MeshLayout(2, 2, 2),
        ),
        (Settings(tensor_parallel_size=2), {}, MeshLayout(4, 1, 2)),
        (Settings(), {"tensor_parallel": TorchTensorParallelPlugin(tp_size=8)}, MeshLayout(1, 1, 8)),
        (
            Settings(strategy="fsdp"),
            {"fsdp": FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")},
            MeshLayout(4, 2, 1),
        ),
    ],
)
def test_eight_ranks_on_nodes_of_two_are_arranged_in_a_mesh(
    settings: Settings, given: dict[str, object], expected: MeshLayout
) -> None:
    assert arrange(8, 2, settings, handlers(**given)) == expected


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (Settings(tensor_parallel_size=3), {}, "8 ranks cannot be arranged as tp=3:"),
        (Settings(strategy="fsdp", fsdp_shard_size=3), {}, "8 ranks cannot be arranged as dp_shard=3:"),
        (Settings(strategy="fsdp", fsdp_shard_size=16), {}, "8 ranks cannot be arranged"),
        (
            Settings(strategy="fsdp"),
            {"parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
            "as dp_replicate=2, dp_shard=2:",
        ),
        (
            Settings(tensor_parallel_size=2),
            {"tensor_parallel": TorchTensorParallelPlugin(tp_size=4)},
            "TorchTensorParallelPlugin=4, runtime.tensor_parallel_size=2",
        ),
    ],
)
def test_mesh_sizes_that_do_not_fit_are_refused(settings: Settings, given: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        arrange(8, 2, settings, handlers(**given))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(2, 2)


def test_repeated_and_named_blocks_are_found_inner_blocks_first() -> None:
    model = Tower()
    assert blocks(model) == list(model.blocks)
    named = blocks(model, ["Block", "Linear"])
    assert named.index(model.blocks[0].inner) < named.index(model.blocks[0])
    with pytest.raises(
        RuntimeMisuse, match=r"fsdp\.wrap .* lists Blok, which .* \(has: Block, Linear, ModuleList, Tower"
    ):
        blocks(model, ["Blok"])


def test_block_with_a_weight_tied_outside_is_not_handled_alone() -> None:
    model = Tower()
    model.out.weight = model.blocks[1].inner.weight
    assert owned_alone(model, model.blocks) == [model.blocks[0]]


def test_fsdp_choices_come_from_settings_and_plugin() -> None:
    found = choose(Settings(mixed_precision="bf16", fsdp_reduce_dtype="bf16", reshard_after_forward=False))
    assert (found.param_dtype, found.reduce_dtype, found.reshard_after_forward) == (
        torch.bfloat16,
        torch.bfloat16,
        False,
    )
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP",
        mixed_precision_policy="fp16",
        auto_wrap_policy="NO_WRAP",
        cpu_offload=True,
    )
    found = choose(Settings(), plugin)
    assert found.reshard_after_forward is False
    assert found.param_dtype is torch.float16
    assert found.cpu_offload
    assert found.find_blocks(Tower()) == []


def test_unsupported_plugin_values_are_refused_or_warned_of() -> None:
    with pytest.raises(RuntimeMisuse, match='use strategy="ddp" instead of NO_SHARD'):
        choose(Settings(), FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"))
    with pytest.raises(RuntimeMisuse, match=r"fsdp\.param_dtype: unknown dtype 'fp12'"):
        dtype_of("fp12", "fsdp.param_dtype")
    with pytest.warns(UserWarning, match=r"ignoring backward_prefetch, use_orig_params\."):
        choose(Settings(), FullyShardedDataParallelPlugin(backward_prefetch="BACKWARD_PRE", use_orig_params=False))


def test_ignored_modules_are_found_by_pattern() -> None:
    model = Tower()
    assert ignored_parameters(model, r"blocks\.\d\.inner") == {
        parameter for block in model.blocks for parameter in block.parameters()
    }


def test_fsdp1_wrap_policies_find_their_modules() -> None:
    model = Tower()

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, Block) and nonwrapped_numel == 6

    found = choose(Settings(), FullyShardedDataParallelPlugin(auto_wrap_policy=policy)).find_blocks(model)
    assert set(found) == set(model.blocks)
    sized = choose(Settings(), FullyShardedDataParallelPlugin(min_num_params=6)).find_blocks(model)
    assert {type(module) for module in sized} == {nn.Linear}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


def test_single_rank_gets_its_model_back_and_raw_duplicates_are_refused(accelerator: Accelerator) -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert accelerator.prepare(model) is model
    prepared = accelerator.prepare(optimizer)
    assert accelerator.prepare(model, prepared) == (model, prepared)
    with pytest.raises(RuntimeMisuse, match=r"this SGD has already been prepared"):
        accelerator.prepare(optimizer)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert accelerator.unwrap_model(nn.Linear(1, 1)).in_features == 1
    assert accelerator.free_memory(model, prepared) == (None, None)
    assert accelerator.prepare(model, prepared)[1].optimizer is optimizer


def test_meta_model_is_refused_and_device_map_model_is_kept(accelerator: Accelerator) -> None:
    with init_empty_weights():
        empty = Tower()
    with pytest.raises(RuntimeMisuse, match="created on the meta device, and its parameters are uninitialised"):
        accelerator.prepare(empty)
    spread = Tower()
    spread.hf_device_map = {"blocks": "cpu", "out": "disk"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(spread)
    assert accelerator.prepare(spread) is spread


def test_fp8_is_refused_without_a_gpu() -> None:
    with pytest.raises(RuntimeMisuse, match=r"fp8 needs a GPU"):
        Accelerator(cpu=True, mixed_precision="fp8")
    Accelerator(cpu=True).end_training()
