"""Accelerate's ``write_basic_config``: the configuration file for this machine's devices, without questions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from hpcaccel.core.default_config import PRECISIONS, basic_config, default_config_path, to_json
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend

__all__ = ["write_basic_config"]


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write the file that ``hpcaccel config default`` writes, which ``hpcaccel launch`` and ``accelerate launch`` read.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``, in any case.
        save_location: the file. Default: Accelerate's, in ``$HF_HOME/accelerate``.

    Returns:
        The file's path; False if it exists already, which is then kept, with a message.

    Raises:
        RuntimeMisuse: an unknown precision.
    """
    path = default_config_path() if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} already exists and is kept. `hpcaccel config` makes a new one")
        return False
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise RuntimeMisuse(f"mixed_precision={mixed_precision!r} is not valid (allowed: {', '.join(PRECISIONS)})")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = device_backend.accelerator()
    atomic_write(path, to_json(basic_config(precision, kind, device_backend.device_count(kind))), mode=0o644)
    return path
