"""A folder for the ranks' PYTHONPATH whose ``sitecustomize`` keeps data-loader workers alive through a SIGTERM."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["FOLDER", "write_loader_shield"]

FOLDER = "loader_shield"
"""In the run directory, like the ranks' code."""


def write_loader_shield(folder: Path) -> None:
    """Make ``folder`` with the file in it: a copy, so that an upgrade leaves queued jobs alone.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(mode=0o750)
    shutil.copyfile(Path(__file__).with_name("sitecustomize.py"), folder / "sitecustomize.py")
