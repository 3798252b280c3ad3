"""Pins: a marker file beside the manifest, for which a checkpoint is never deleted."""

from __future__ import annotations

import time
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.core.run_dir import write_json

__all__ = ["is_pinned", "pin", "unpin"]


def is_pinned(path: Path) -> bool:
    return (path / checkpoint_files.PINNED).exists()


def pin(path: Path, *, why: str) -> bool:
    """Pin a checkpoint; False where it was pinned already, by whomever.

    Raises:
        OSError: its directory cannot be written.
    """
    if is_pinned(path):
        return False
    write_json(path / checkpoint_files.PINNED, {"why": why, "time": time.time()})
    return True


def unpin(path: Path) -> bool:
    """Take the pin out; False where there was none.

    Raises:
        OSError: its directory cannot be written.
    """
    try:
        (path / checkpoint_files.PINNED).unlink()
    except FileNotFoundError:
        return False
    return True
