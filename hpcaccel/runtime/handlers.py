"""Objects for ``Accelerator(...)``: handlers with options for torch's own classes, and plugins.

Fields that also exist in Accelerate 1.15 have the same names; some defaults differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from hpcaccel.runtime.enums import DDPCommunicationHookType, DynamoBackend

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "MSAMPRecipeKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
]


@dataclass
class KwargsHandler:
    """Base class of the handlers for ``Accelerator(kwargs_handlers=[...])``, and of some plugins."""

    def to_dict(self) -> dict[str, Any]:
        """Deep copies of all fields, by name."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Deep copies of the fields that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``, by the names of its arguments."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel, by the names of its arguments, and gradient compression.

    Args:
        bucket_cap_mb: size of a gradient bucket, in MiB.
        comm_hook: how gradients are compressed before they are reduced.
        comm_wrapper: ``fp16`` or ``bf16``: the type in which a compressing hook communicates.
        comm_state_option: arguments of the hook's state, such as PowerSGD's ``matrix_approximation_rank``.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, by the names of its arguments. Used with ``mixed_precision="fp16"``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``. A ``timeout`` of None means the spec's
    ``runtime.timeout_seconds`` (default: 30 minutes)."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``. ``activities`` are names such as ``cpu`` and ``cuda``; for an unknown name
    ``Accelerator.profile`` raises RuntimeMisuse. ``schedule_option`` holds the arguments of
    ``torch.profiler.schedule``: ``wait``, ``warmup``, ``active`` and others. If ``output_trace_dir`` is given, each
    rank writes a Chrome trace ``profile_<rank>.json`` there."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of fp8 with torchao."""

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None


@dataclass
class TERecipeKwargs(KwargsHandler):
    """fp8 options of TransformerEngine, for ``apply_fp8_autowrap``. ``prepare`` supports ``AORecipeKwargs`` only."""

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 with MS-AMP, which is not supported: use ``AORecipeKwargs``."""

    opt_level: str | None = None


@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """Accelerate's older class for all fp8 recipes, which is not supported: use ``AORecipeKwargs``."""

    opt_level: str | None = None
    backend: str | None = None


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders order and divide the data. ``Accelerator`` has arguments for the first three fields.

    Args:
        use_seedable_sampler: whether to draw the order of epoch e with the seed ``data_seed + e``, not from the
            sampler's generator.
        data_seed: by default, a random number or, with ``use_seedable_sampler``, torch's initial seed.
        non_blocking: whether to copy batches to the GPU asynchronously.
        use_stateful_dataloader: whether to read iterable datasets with torchdata's StatefulDataLoader.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Directories of a script's checkpoints and logs. With ``automatic_checkpoint_naming``, ``save_state`` saves to
    ``checkpoints/checkpoint_<iteration>``, and deletes the oldest checkpoints beyond ``total_limit``.

    Args:
        logging_dir: directory for trackers that write files; default: ``project_dir``.
        iteration: number of the next checkpoint.
        save_on_each_node: whether ``Accelerator.save`` writes on the first process of each node.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` to the same folder if it is not set."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    Args:
        num_steps: number of micro-batches per optimizer step.
        adjust_scheduler: without effect.
        sync_with_dataloader: whether the last batch of a loader always ends in an optimizer step.
        sync_each_batch: whether gradients are reduced over the ranks in every micro-batch. With FSDP this saves memory
            at the cost of communication.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class FullyShardedDataParallelPlugin:
    """FSDP2 settings with Accelerate's field names. Fields that only FSDP1 has are ignored, and a warning lists those
    that are set. ``cpu_ram_efficient_loading`` and the configurations of state dicts are ignored, too.
    ``state_dict_type`` selects the files of ``save_fsdp_model``. Outside a run, an Accelerator sets fields that are
    None from the environment variables ``FSDP_*``.

    Args:
        sharding_strategy: a name of FSDP1, such as ``FULL_SHARD``; replaces ``reshard_after_forward``.
        reshard_after_forward: a bool or an integer, as in torch's ``fully_shard``.
        mixed_precision_policy: the name of a dtype, a dict of dtypes, or torch's ``MixedPrecisionPolicy``.
        cpu_offload: a bool, or a policy of torch: whether shards are kept in host memory.
        ignored_modules: modules that are not sharded, or a regular expression for their names.
        activation_checkpointing: whether to recompute the activations of blocks in the backward pass.
        transformer_cls_names_to_wrap: classes of the blocks that are sharded one by one.
        min_num_params: without these names, the number of parameter elements from which a module is a block.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set ``state_dict_type``, if it is given."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism over ``tp_size`` neighbouring ranks. ``torch_device_mesh`` has no effect."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile``, by the names of its arguments.

    Args:
        use_regional_compilation: whether to compile repeated blocks one by one, which shortens compilation.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
