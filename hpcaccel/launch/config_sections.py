"""The keys of the sections of Accelerate's configuration file (``fsdp_config``, ``deepspeed_config`` …)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.launch.flags import PARALLELISM_CHOICES
from hpcaccel.launch.mesh_sizes import SIZES

__all__ = ["SECTIONS", "closest", "dynamo_backend", "section_problems", "typed", "with_prefix"]

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
_WHOLE = {
    "fsdp_version", "zero_stage", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_history_length",
    "parallelism_config_sp_seq_length", *SIZES,
}  # fmt: skip
_NUMBER = {"fsdp_min_num_params"}
_BOOLEAN = {
    "fsdp_offload_params", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload",
    "zero3_init_flag", "zero3_save_16bit_model", "fp8_use_autocast_during_eval", "fp8_enable_fsdp_float8_all_gather",
    "fp8_pad_inner_dim", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation",
    "parallelism_config_sp_seq_length_is_variable",
}  # fmt: skip
_CHOICES = {f"parallelism_config_{key}": words for key, words in PARALLELISM_CHOICES.items()}
_OR_AUTO = {"gradient_accumulation_steps": int, "gradient_clipping": float}
"""Numbers for which DeepSpeed also takes ``auto``."""
_ANY = {"fp8_override_linear_precision", "fsdp_ignored_modules"}
"""Keys with a list, or with text. Those in none of these sets have text, a number or a boolean."""
_FLAGS = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}


def with_prefix(section: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values of a section under the names that Accelerate's launcher uses for them: with the section's prefix."""
    prefix, _ = SECTIONS[section]
    adds = section in _WITHOUT_PREFIX_TOO
    return {
        str(key) if str(key).startswith(prefix) or not adds else f"{prefix}{key}": value
        for key, value in values.items()
    }


def section_problems(section: str, values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The keys of a section that are not among Accelerate's, or whose value has the wrong kind, each with a message."""
    prefix, keys = SECTIONS[section]
    known = [prefix + key for key in keys]
    problems = []
    for given, value in values.items():
        name = next(iter(with_prefix(section, {given: value})))
        if name not in known:
            problems.append((str(given), f"{section}.{given} is not a known key{closest(name, known)}"))
            continue
        try:
            _converted(name, value)
        except ValueError as error:
            problems.append((str(given), f"{section}.{given} {error}"))
    return problems


def typed(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of a checked section as int, float and bool, where the file has text; without keys that are empty."""
    return {name: _converted(name, value) for name, value in (values or {}).items() if value is not None}


def _converted(name: str, value: Any) -> Any:
    """The value of a section's key, in its kind. Raises ValueError with the end of a message."""
    if value is None or name in _ANY or name.startswith("megatron_lm_"):
        return value
    if isinstance(value, list | dict):
        raise ValueError(f"{value!r} must be a single value")
    if name == "dynamo_backend":
        return dynamo_backend(value)
    if name in _CHOICES:
        return _choice(value, _CHOICES[name])
    if name in _BOOLEAN:
        if str(value).lower() not in _FLAGS:
            raise ValueError(f"{value!r} must be true or false")
        return _FLAGS[str(value).lower()]
    number = int if name in _WHOLE else float if name in _NUMBER else _OR_AUTO.get(name)
    if number is None or (name in _OR_AUTO and str(value).lower() == "auto"):
        return value
    try:
        if isinstance(value, bool) or (number is int and isinstance(value, float)):
            raise ValueError
        found = number(value)
    except ValueError:
        auto = ", or auto" * (name in _OR_AUTO)
        raise ValueError(f"{value!r} must be a {'whole ' * (number is int)}number{auto}") from None
    if name in SIZES and found < 1:
        raise ValueError(f"{value!r} must be at least 1")
    return found


def _choice(value: Any, allowed: tuple[str, ...]) -> str:
    match = next((one for one in allowed if one == str(value).lower()), None)
    if match is None:
        raise ValueError(f"{str(value)!r} is not valid (allowed: {', '.join(allowed)})")
    return match


def dynamo_backend(value: Any) -> str:
    """A backend of torch.compile as text. YAML reads an unquoted ``no`` as false, and ``yes`` as true."""
    return {True: "inductor", False: "no"}[value] if isinstance(value, bool) else str(value)


def closest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the closest known one, or all of them."""
    allowed = list(known)
    return did_you_mean(word, allowed) or f" (allowed: {', '.join(allowed)})"
