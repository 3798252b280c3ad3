"""Where Accelerate's configuration file is, and the content that ``accelerate config default`` gives it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CONFIG_NAMES", "PRECISIONS", "basic_config", "config_folder", "default_config_path", "to_json"]

CONFIG_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")
"""Names of the file, in the order in which they are looked for."""
PRECISIONS = ("no", "fp16", "bf16", "fp8")


def config_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of Accelerate's configuration file: ``$HF_HOME/accelerate``, else
    ``$XDG_CACHE_HOME/huggingface/accelerate``, else ``~/.cache/huggingface/accelerate``.

    As in Accelerate, the first variable that is set decides, even if the folder does not exist.

    Args:
        environment: variables; the process's own if None.
    """
    values = os.environ if environment is None else environment
    if home := values.get("HF_HOME"):
        return Path(os.path.expanduser(home)) / "accelerate"
    return Path(os.path.expanduser(values.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "accelerate"


def default_config_path(environment: Mapping[str, str] | None = None) -> Path:
    """The path of a new configuration file, in the folder of :func:`config_folder`."""
    return config_folder(environment) / CONFIG_NAMES[0]


def basic_config(mixed_precision: str, kind: str, devices: int) -> dict[str, str | int | bool]:
    """The configuration that ``accelerate config default`` writes: one machine, a process for each of its devices.

    Args:
        mixed_precision: one of ``PRECISIONS``.
        kind: kind of the devices, as torch names it (``cuda``, ``xpu`` …); ``cpu`` if there are none.
        devices: number of devices; ignored for ``cpu``.
    """
    without = kind == "cpu" or devices == 0
    several = {"cuda": "MULTI_GPU"}.get(kind, f"MULTI_{kind.upper()}")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": several if devices > 1 and not without else "NO",
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": 1 if without else devices,
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": without,
    }


def to_json(config: Mapping[str, object]) -> str:
    """The file's content in JSON, which YAML parsers read too. Accelerate's default file has this form."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
