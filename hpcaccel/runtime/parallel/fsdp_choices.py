"""A model's FSDP2 options: the settings, overridden by a plugin with Accelerate's field names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.precision import COMPUTE_DTYPES
from hpcaccel.runtime.parallel.wrapping import blocks
from hpcaccel.runtime.settings import Settings

__all__ = ["FsdpChoices", "choose", "dtype_of", "ignored_parameters"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "no": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_RESHARD = {
    "FULL_SHARD": True,
    "HYBRID_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD_ZERO2": False,
    "_HYBRID_SHARD_ZERO2": False,
}
"""FSDP2's ``reshard_after_forward`` for each sharding strategy of FSDP1."""
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")
_OF_FSDP1 = {
    "backward_prefetch": (None, "NO_PREFETCH"),
    "forward_prefetch": (None, False),
    "limit_all_gathers": (None, True),
    "use_orig_params": (None, True),
    "sync_module_states": (None, True),
    "param_init_fn": (None,),
    "activation_checkpointing_offload": (None, False),
}
"""Fields of the plugin that have no counterpart in FSDP2, with the values that cause no warning."""


class FsdpChoices(NamedTuple):
    """How one model is sharded. The dtypes are those of torch's ``MixedPrecisionPolicy``."""

    find_blocks: Callable[[nn.Module], list[nn.Module]]
    reshard_after_forward: bool | int | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cpu_offload: bool
    ignored: Any
    activation_checkpointing: bool


def choose(settings: Settings, plugin: Any = None) -> FsdpChoices:
    """The options from the settings, overridden by those of the plugin.

    Args:
        plugin: a ``FullyShardedDataParallelPlugin``, or None.

    Raises:
        RuntimeMisuse: a value is unknown, or has no counterpart in FSDP2.
    """
    compute = COMPUTE_DTYPES.get(settings.mixed_precision)
    found = FsdpChoices(
        find_blocks=lambda model: blocks(model, settings.fsdp_wrap),
        reshard_after_forward=settings.reshard_after_forward,
        param_dtype=dtype_of(settings.fsdp_param_dtype, "fsdp.param_dtype") or compute,
        reduce_dtype=dtype_of(settings.fsdp_reduce_dtype, "fsdp.reduce_dtype") or (compute and torch.float32),
        output_dtype=dtype_of(settings.fsdp_output_dtype, "fsdp.output_dtype"),
        cpu_offload=settings.fsdp_cpu_offload,
        ignored=None,
        activation_checkpointing=settings.activation_checkpointing,
    )
    return found if plugin is None else _with_plugin(found, plugin)


def _with_plugin(base: FsdpChoices, plugin: Any) -> FsdpChoices:
    _warn_of_fsdp1(plugin)
    changed: dict[str, Any] = {"ignored": plugin.ignored_modules}
    reshard = _reshard(plugin)
    if reshard is not None:
        changed["reshard_after_forward"] = reshard
    if plugin.mixed_precision_policy is not None:
        changed |= _policy(plugin.mixed_precision_policy)
    offload = plugin.cpu_offload
    if offload is not None:
        # A bool, FSDP1's CPUOffload(offload_params=...), or torch's CPUOffloadPolicy.
        changed["cpu_offload"] = bool(getattr(offload, "offload_params", offload is not False))
    if plugin.activation_checkpointing is not None:
        changed["activation_checkpointing"] = bool(plugin.activation_checkpointing)
    finder = _finder(plugin)
    if finder is not None:
        changed["find_blocks"] = finder
    return base._replace(**changed)


def _warn_of_fsdp1(plugin: Any) -> None:
    set_ones = [name for name, silent in _OF_FSDP1.items() if getattr(plugin, name, None) not in silent]
    if set_ones:
        warnings.warn(
            f"FullyShardedDataParallelPlugin: ignoring {', '.join(set_ones)}. Models are sharded with FSDP2, "
            "which has no such settings",
            stacklevel=2,
        )


def _reshard(plugin: Any) -> bool | int | None:
    """FSDP2's ``reshard_after_forward``; None if the plugin does not set it.

    Raises:
        RuntimeMisuse: the strategy does not shard, or does not exist.
    """
    value = plugin.sharding_strategy if plugin.sharding_strategy is not None else plugin.reshard_after_forward
    if value is None or isinstance(value, bool):
        return value
    name = str(getattr(value, "name", value)).upper()
    if name.isdigit() and not isinstance(value, str):
        return int(name)
    if name in ("TRUE", "FALSE"):
        return name == "TRUE"
    if name not in _RESHARD:
        if name == "NO_SHARD":
            raise RuntimeMisuse('FullyShardedDataParallelPlugin: use strategy="ddp" instead of NO_SHARD')
        raise RuntimeMisuse(
            f"FullyShardedDataParallelPlugin: unknown sharding strategy {value!r} "
            f"(allowed: {', '.join(_RESHARD)}, true, false, an integer)"
        )
    return _RESHARD[name]


def _policy(policy: Any) -> dict[str, Any]:
    """The dtypes in ``policy``, which may be a dictionary, the name of a dtype, or an object with the fields of torch's
    ``MixedPrecisionPolicy``."""
    if isinstance(policy, str):
        return {"param_dtype": dtype_of(policy, "mixed_precision_policy"), "reduce_dtype": dtype_of(policy, "")}
    values: dict[str, Any] = (
        policy if isinstance(policy, dict) else {name: getattr(policy, name, None) for name in _POLICY}
    )
    return {name: dtype_of(values.get(name), f"mixed_precision_policy.{name}") for name in _POLICY}


def dtype_of(value: Any, name: str) -> torch.dtype | None:
    """The dtype that ``value`` is or names; None for None.

    Args:
        name: name of the setting that has this value, for messages.

    Raises:
        RuntimeMisuse: ``value`` is neither a dtype nor the name of a dtype.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    key = str(getattr(value, "value", value)).removeprefix("torch.")
    if key not in _DTYPES:
        raise RuntimeMisuse(f"{name}: unknown dtype {value!r} (allowed: {', '.join(_DTYPES)})")
    return _DTYPES[key]


def _finder(plugin: Any) -> Callable[[nn.Module], list[nn.Module]] | None:
    """The function that finds the blocks that the plugin names; None if it leaves the choice to the settings."""
    names: Sequence[str] | str | None = plugin.transformer_cls_names_to_wrap
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if names:
        return lambda model: blocks(model, names)
    policy = plugin.auto_wrap_policy
    if plugin.min_num_params and (policy is None or isinstance(policy, str)):
        return lambda model: _by_size(model, int(plugin.min_num_params))
    if isinstance(policy, str) and policy.upper() == "NO_WRAP":
        return lambda model: []
    if callable(policy):
        return lambda model: _by_policy(model, policy)
    return None


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least ``least`` parameter elements, not counting those of selected inner modules; inner modules
    first."""
    taken: set[nn.Parameter] = set()
    found = []
    for module in list(model.modules())[:0:-1]:
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        if sum(parameter.numel() for parameter in own) >= least and type(module).forward is not nn.Module.forward:
            found.append(module)
            taken.update(own)
    return found


def _by_policy(model: nn.Module, policy: Callable[..., Any]) -> list[nn.Module]:
    """Modules that a wrap policy for FSDP1 accepts. The policy gets each module and its number of parameters."""
    found = []
    for module in list(model.modules())[:0:-1]:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count and policy(module=module, recurse=False, nonwrapped_numel=count):
            found.append(module)
    return found


def ignored_parameters(model: nn.Module, ignored: Any) -> set[nn.Parameter]:
    """Parameters of the modules in ``ignored``: an iterable of modules, or a regular expression for their names."""
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        ignored = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in ignored for parameter in module.parameters()}
