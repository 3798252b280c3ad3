"""Bringing an old configuration file up to date."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcaccel.launch.launch_config import KEY_KINDS, LaunchConfig, save_config, values_in, write_config_text

__all__ = ["update_config"]

_NEW_KEYS: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": False, "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "num_machines": 1, "rdzv_backend": "static",
    "same_network": False, "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
"""Keys that a file of Accelerate 1.15 has, with the values that they have by default."""


def update_config(path: Path, config: LaunchConfig) -> list[str]:
    """Bring the file of ``config`` up to date: add the keys that Accelerate has added, with their defaults, and remove
    those that it has removed. The old file is kept as ``FILE.bak``.

    Returns:
        A line for each change; empty if the file has all keys, and is then left as it is.

    Raises:
        UserError: the file, or the copy of it, cannot be written.
    """
    old = values_in(path)
    missing = {name: value for name, value in _NEW_KEYS.items() if getattr(config, name) is None}
    if config.num_processes is None:
        missing["num_processes"] = 1 if config.distributed_type == "NO" else -1
    updated = dataclasses.replace(config, **missing, retired=())
    gone = [str(key) for key in old if key not in KEY_KINDS]
    moved = [key for key in ("mixed_precision", "dynamo_config") if key not in old and getattr(config, key) is not None]
    changes = [f"added {name}: {json.dumps(value)}" for name, value in missing.items()]
    changes += [f"added {name}" for name in moved] + [f"removed {name}" for name in gone]
    if changes:
        write_config_text(path.with_name(f"{path.name}.bak"), path.read_text(encoding="utf-8"))
        save_config(updated, path)
    return changes
