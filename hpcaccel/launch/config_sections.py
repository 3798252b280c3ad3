"""The keys of the sections of Accelerate's configuration file (``fsdp_config``, ``deepspeed_config`` …)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["SECTIONS", "closest", "section_problems", "with_prefix"]

_FSDP = (
    "version", "sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "backward_prefetch_policy",
    "state_dict_type", "forward_prefetch", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states",
    "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules",
)  # fmt: skip
_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping",
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_MEGATRON = (
    "tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations",
    "use_distributed_optimizer", "gradient_clipping", "use_custom_fsdp", "no_load_optim", "no_save_optim",
    "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload", "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "attention_backend", "expert_model_parallel_size", "context_parallel_size", "attention_dropout", "hidden_dropout",
    "attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)  # fmt: skip
_PARALLELISM = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size",
    "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip
_FP8 = (
    "backend", "use_autocast_during_eval", "margin", "interval", "format", "amax_history_len", "amax_compute_algo",
    "amax_history_length", "amax_compute_algorithm", "override_linear_precision", "opt_level", "optimization_level",
    "enable_fsdp_float8_all_gather", "pad_inner_dim",
)  # fmt: skip

SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fsdp_config": ("fsdp_", _FSDP),
    "deepspeed_config": ("", _DEEPSPEED),
    "megatron_lm_config": ("megatron_lm_", _MEGATRON),
    "parallelism_config": ("parallelism_config_", _PARALLELISM),
    "fp8_config": ("fp8_", _FP8),
    "mpirun_config": ("mpirun_", ("hostfile", "ccl")),
    "dynamo_config": ("dynamo_", ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")),
}
"""By section: the prefix of its keys, and the keys without it."""
_WITHOUT_PREFIX_TOO = {"fsdp_config", "fp8_config", "dynamo_config"}
"""Sections in which Accelerate adds a prefix that is missing."""


def with_prefix(section: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values of a section under the names that Accelerate's launcher uses for them: with the section's prefix."""
    prefix, _ = SECTIONS[section]
    adds = section in _WITHOUT_PREFIX_TOO
    return {
        str(key) if str(key).startswith(prefix) or not adds else f"{prefix}{key}": value
        for key, value in values.items()
    }


def section_problems(section: str, values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The keys of a section that Accelerate does not know, each with a message."""
    prefix, keys = SECTIONS[section]
    known = [prefix + key for key in keys]
    return [
        (str(given), f"{section}.{given} is not a known key{closest(name, known)}")
        for given, name in zip(values, with_prefix(section, values), strict=True)
        if name not in known
    ]


def closest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the closest known one, or all of them."""
    allowed = list(known)
    match = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f". Did you mean {match[0]!r}?" if match else f" (allowed: {', '.join(allowed)})"
