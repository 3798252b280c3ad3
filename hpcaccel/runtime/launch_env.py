"""What variables of the environment ask for, where a program was started without hpcaccel: by torchrun, by srun, or by
``accelerate launch``, whose variables are read under their own names. A run says all of this in its spec instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.environ import FALSE, TRUE
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin

__all__ = ["asked_for", "fsdp_plugin"]

STRATEGY = "HPCACCEL_STRATEGY"
USE_FSDP = "ACCELERATE_USE_FSDP"


def asked_for(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Settings by name.

    Raises:
        RuntimeMisuse: a variable with a value that it cannot have.
    """
    found: dict[str, Any] = {}
    if environ.get("ACCELERATE_MIXED_PRECISION"):
        found["mixed_precision"] = environ["ACCELERATE_MIXED_PRECISION"].lower()
    if environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        found["gradient_accumulation_steps"] = _whole("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", environ)
    if environ.get(STRATEGY):
        found["strategy"] = _one_of("ddp", "fsdp")(STRATEGY, environ)
    elif environ.get(USE_FSDP) and _flag(USE_FSDP, environ):
        found["strategy"] = "fsdp"
    return found


def fsdp_plugin(given: FullyShardedDataParallelPlugin | None, *, wanted: bool) -> FullyShardedDataParallelPlugin | None:
    """The script's plugin, whose empty fields ``FSDP_*`` variables fill in; where it gives none and FSDP is ``wanted``
    by the environment, one of these variables alone.

    Raises:
        RuntimeMisuse: a variable with a value that it cannot have.
    """
    if given is None and not wanted:
        return None
    plugin = FullyShardedDataParallelPlugin() if given is None else given
    found = {
        field: read(f"FSDP_{name}", os.environ)
        for name, (field, read) in _FIELDS.items()
        if os.environ.get(f"FSDP_{name}") and getattr(plugin, field) is None
    }
    if plugin.sharding_strategy is not None or plugin.reshard_after_forward is not None:
        found.pop("sharding_strategy", None)
        found.pop("reshard_after_forward", None)
    if "reshard_after_forward" in found:
        found.pop("sharding_strategy", None)  # the older word for it, which launchers set besides
    return replace(plugin, **found)


def _flag(name: str, environ: Mapping[str, str]) -> bool:
    word = environ[name].strip().lower()
    if word not in TRUE + FALSE:
        raise RuntimeMisuse(f"{name}={environ[name]!r} is neither yes ({', '.join(TRUE)}) nor no ({', '.join(FALSE)})")
    return word in TRUE


def _whole(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if not text.isdigit():
        raise RuntimeMisuse(f"{name}={environ[name]!r} must be a whole number")
    return int(text)


def _one_of(*words: str) -> Callable[[str, Mapping[str, str]], str]:
    def read(name: str, environ: Mapping[str, str]) -> str:
        word = environ[name].strip()
        found = next((known for known in words if known.lower() == word.lower()), None)
        if found is None:
            raise RuntimeMisuse(f"{name}={environ[name]!r} is not known (one of: {', '.join(words)})")
        return found

    return read


_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _sharding(name: str, environ: Mapping[str, str]) -> str:
    """By name, or by its number from 1 on."""
    text = environ[name].strip()
    if text.isdigit() and 0 < int(text) <= len(_SHARDING):
        return _SHARDING[int(text) - 1]
    return _one_of(*_SHARDING)(name, environ)


def _resharding(name: str, environ: Mapping[str, str]) -> bool | str:
    """Yes or no; for FSDP1 launchers set the sharding strategy's name here."""
    word = environ[name].strip().lower()
    return _flag(name, environ) if word in TRUE + FALSE and not word.isdigit() else _sharding(name, environ)


def _text(name: str, environ: Mapping[str, str]) -> str:
    return environ[name]


def _names(name: str, environ: Mapping[str, str]) -> list[str]:
    return [word.strip() for word in environ[name].split(",") if word.strip()]


_FIELDS: dict[str, tuple[str, Callable[[str, Mapping[str, str]], Any]]] = {
    "VERSION": ("fsdp_version", _whole),
    "SHARDING_STRATEGY": ("sharding_strategy", _sharding),
    "RESHARD_AFTER_FORWARD": ("reshard_after_forward", _resharding),
    "OFFLOAD_PARAMS": ("cpu_offload", _flag),
    "AUTO_WRAP_POLICY": ("auto_wrap_policy", _one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    "TRANSFORMER_CLS_TO_WRAP": ("transformer_cls_names_to_wrap", _names),
    "MIN_NUM_PARAMS": ("min_num_params", _whole),
    "IGNORED_MODULES": ("ignored_modules", _text),
    "ACTIVATION_CHECKPOINTING": ("activation_checkpointing", _flag),
    "ACTIVATION_CHECKPOINTING_OFFLOAD": ("activation_checkpointing_offload", _flag),
    "BACKWARD_PREFETCH": ("backward_prefetch", _text),
    "FORWARD_PREFETCH": ("forward_prefetch", _flag),
    "USE_ORIG_PARAMS": ("use_orig_params", _flag),
    "SYNC_MODULE_STATES": ("sync_module_states", _flag),
    "CPU_RAM_EFFICIENT_LOADING": ("cpu_ram_efficient_loading", _flag),
    "STATE_DICT_TYPE": ("state_dict_type", _text),
}
"""Variables after ``FSDP_``, with the plugin's fields and how they are read. Those of FSDP1 alone have no effect, as in
the plugin."""
