"""Opening safetensors files, for which the package is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcaccel.errors import CheckpointError

__all__ = ["open_safetensors"]


def open_safetensors(path: Path, device: str = "cpu") -> Any:
    """A context that gives the open file, from which tensors are read one by one, onto ``device``.

    Raises:
        CheckpointError: no safetensors file, or the package is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"reading {path} needs safetensors, which is not installed: pip install 'hpcaccel[train]'"
        ) from error
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
