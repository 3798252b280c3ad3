"""Environment variables: settings of programs started without hpcaccel, and helpers that read and set variables.

Programs started by torchrun, srun or ``accelerate launch`` take settings from ``HPCACCEL_*`` variables and from the
variables of ``accelerate launch``. In a run these settings come from the spec.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from hpcaccel.runtime.parallelism_config import ParallelismConfig, TorchContextParallelConfig

__all__ = [
    "clear_environment",
    "convert_dict_to_env_variables",
    "dynamo_plugin",
    "fsdp_plugin",
    "get_int_from_env",
    "parallelism_config",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "settings_from_env",
    "str_to_bool",
]

TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")

STRATEGY = "HPCACCEL_STRATEGY"
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
_DYNAMO = "ACCELERATE_DYNAMO_"


def settings_from_env(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings that environment variables set, by name.

    Raises:
        RuntimeMisuse: a variable has an invalid value.
    """
    found: dict[str, Any] = {}
    if environ.get("ACCELERATE_MIXED_PRECISION"):
        found["mixed_precision"] = environ["ACCELERATE_MIXED_PRECISION"].lower()
    if environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        found["gradient_accumulation_steps"] = _whole("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", environ)
    if environ.get(STRATEGY):
        found["strategy"] = _one_of("ddp", "fsdp", "deepspeed")(STRATEGY, environ)
    elif wanted := [name for name in (USE_FSDP, USE_DEEPSPEED) if environ.get(name) and _flag(name, environ)]:
        if len(wanted) > 1:
            raise RuntimeMisuse(
                f"{' and '.join(wanted)} are both true, but FSDP and DeepSpeed cannot be combined: set one"
            )
        found["strategy"] = "fsdp" if wanted == [USE_FSDP] else "deepspeed"
    if environ.get("FORK_LAUNCHED"):
        # No scheduler signals the ranks of a notebook. A SIGTERM comes from the launcher: another rank has failed.
        found["stop"] = "signals"
    return found


def fsdp_plugin(given: FullyShardedDataParallelPlugin | None, *, wanted: bool) -> FullyShardedDataParallelPlugin | None:
    """The script's plugin, with fields that are None set from ``FSDP_*`` variables.

    Args:
        given: the script's plugin; None if the script has none.
        wanted: whether the environment selects FSDP. If so, a plugin is created even if ``given`` is None.

    Raises:
        RuntimeMisuse: a variable has an invalid value.
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
        found.pop("sharding_strategy", None)  # the older name of the setting; launchers set both
    return replace(plugin, **found)


def dynamo_plugin(environ: Mapping[str, str] = os.environ) -> TorchDynamoPlugin | None:
    """How to compile models, from ``ACCELERATE_DYNAMO_*``; None if the environment names no backend.

    Raises:
        RuntimeMisuse: a variable has an invalid value.
    """
    backend = environ.get(f"{_DYNAMO}BACKEND", "no").strip().lower()
    if backend in ("", "no"):
        return None
    given = {
        field: _flag(_DYNAMO + name, environ)
        for name, field in (
            ("USE_FULLGRAPH", "fullgraph"),
            ("USE_DYNAMIC", "dynamic"),
            ("USE_REGIONAL_COMPILATION", "use_regional_compilation"),
        )
        if environ.get(_DYNAMO + name)
    }
    return TorchDynamoPlugin(backend=backend, mode=environ.get(f"{_DYNAMO}MODE") or None, **given)


def parallelism_config(environ: Mapping[str, str] = os.environ) -> ParallelismConfig | None:
    """The mesh of ranks from ``PARALLELISM_CONFIG_*``; None unless ``ACCELERATE_USE_PARALLELISM_CONFIG`` is true.

    Raises:
        RuntimeMisuse: a variable has an invalid value, or values contradict each other.
    """
    if not environ.get(USE_PARALLELISM) or not _flag(USE_PARALLELISM, environ):
        return None
    sizes = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    names = {size: f"PARALLELISM_CONFIG_{size.upper()}" for size in sizes}
    given: dict[str, Any] = {size: _whole(name, environ) for size, name in names.items() if environ.get(name)}
    if given.get("cp_size", 1) > 1:
        given["cp_handler"] = TorchContextParallelConfig(environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY"))
    return ParallelismConfig(**given)


def _flag(name: str, environ: Mapping[str, str]) -> bool:
    word = environ[name].strip().lower()
    if word not in TRUE + FALSE:
        raise RuntimeMisuse(
            f"{name}={environ[name]!r} is not a boolean (true: {', '.join(TRUE)}; false: {', '.join(FALSE)})"
        )
    return word in TRUE


def _whole(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if not text.isdigit():
        raise RuntimeMisuse(f"{name}={environ[name]!r} must be a non-negative integer")
    return int(text)


def _one_of(*words: str) -> Callable[[str, Mapping[str, str]], str]:
    def read(name: str, environ: Mapping[str, str]) -> str:
        word = environ[name].strip()
        found = next((known for known in words if known.lower() == word.lower()), None)
        if found is None:
            raise RuntimeMisuse(f"{name}={environ[name]!r} is not a valid value (allowed: {', '.join(words)})")
        return found

    return read


FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""Sharding strategies in the order of their numbers, from 1."""
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]


def _sharding(name: str, environ: Mapping[str, str]) -> str:
    """The name of a sharding strategy. The variable contains the name or the strategy's number, from 1."""
    text = environ[name].strip()
    if text.isdigit() and 0 < int(text) <= len(FSDP_SHARDING_STRATEGY):
        return FSDP_SHARDING_STRATEGY[int(text) - 1]
    return _one_of(*FSDP_SHARDING_STRATEGY)(name, environ)


def _resharding(name: str, environ: Mapping[str, str]) -> bool | str:
    """A boolean, or the name of a sharding strategy, which launchers for FSDP1 store in this variable."""
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
    "AUTO_WRAP_POLICY": ("auto_wrap_policy", _one_of(*FSDP_AUTO_WRAP_POLICY)),
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
"""For each variable, by its name after ``FSDP_``: the plugin's field that it sets, and the function that parses it.
Fields that only FSDP1 has are ignored, as in the plugin."""


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Parse a boolean, such as ``yes`` or ``off``. Returns 1 or 0, or a bool if ``to_bool`` is set.

    Raises:
        RuntimeMisuse: ``value`` is not in ``TRUE`` or ``FALSE``.
    """
    word = value.lower()
    if word not in TRUE + FALSE:
        raise RuntimeMisuse(f"{value!r} is not a boolean (true: {', '.join(TRUE)}; false: {', '.join(FALSE)})")
    return word in TRUE if to_bool else int(word in TRUE)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Value of the first of these variables whose value is 0 or more; ``default`` if there is none.

    Raises:
        ValueError: a variable's value is not an integer.
    """
    for key in env_keys:
        value = int(os.environ.get(key, -1))
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Value of a boolean variable.

    Raises:
        RuntimeMisuse: the value is not a boolean.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Value of a variable, as text; ``default`` if it is not set."""
    return os.environ.get(key, str(default))


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables inside the ``with`` block; names are converted to upper case."""
    wanted = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables inside the ``with`` block, and restore them at its end."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``KEY=value`` for an environment file. Variables that the format cannot represent are left out, and a
    warning is logged."""
    lines = []
    for key, value in current_env.items():
        if not key or not value or set(";\n<> ") & set(key + value):
            logging.getLogger(__name__).warning(
                "%s=%s is left out of the environment file: names and values must not be empty or contain a space, a "
                "newline, or one of ; < >",
                key,
                value,
            )
        else:
            lines.append(f"{key}={value}\n")
    return lines
