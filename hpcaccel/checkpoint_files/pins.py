"""Pins: marker files beside the manifests of checkpoints, which protect the checkpoints from deletion."""

from __future__ import annotations

import time
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import write_json

__all__ = ["is_pinned", "pin", "unpin"]


def is_pinned(path: Path) -> bool:
    return (path / checkpoint_files.PINNED).exists()


def pin(path: Path, *, why: str) -> bool:
    """Pin a checkpoint. Returns False if it was already pinned.

    Raises:
        OSError: the checkpoint's directory is not writable.
    """
    if is_pinned(path):
        return False
    write_json(path / checkpoint_files.PINNED, {"why": why, "time": time.time()})
    return True


def unpin(path: Path) -> bool:
    """Remove a checkpoint's pin. Returns False if there was none.

    Raises:
        OSError: the checkpoint's directory is not writable.
    """
    try:
        (path / checkpoint_files.PINNED).unlink()
    except FileNotFoundError:
        return False
    return True
