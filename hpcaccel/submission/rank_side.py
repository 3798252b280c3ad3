"""The ranks' part of hpcaccel, put into the run directory for containers whose image has torch and no hpcaccel.

A copy, like the batch step's program: an upgrade leaves queued jobs alone, and nothing else of this machine's Python
is seen inside of the container.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import hpcaccel

__all__ = ["FOLDER", "write_rank_side"]

FOLDER = "rank_side"
"""In the run directory; it goes in front of the ranks' PYTHONPATH and is mounted read-only."""

_NOT_FOR_RANKS = {"spec", "render", "submission", "sweeps", "view", "service", "cli", "node", "templates"}


def write_rank_side(folder: Path) -> None:
    """Make ``folder`` with the package in it: base, checkpoint, runtime, and the pages of Accelerate's names.

    Raises:
        OSError: it cannot be written.
    """
    package = Path(hpcaccel.__file__).parent

    def leave_out(place: str, names: list[str]) -> set[str]:
        unwanted = {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".so"))}
        return unwanted | (_NOT_FOR_RANKS.intersection(names) if Path(place) == package else set())

    shutil.copytree(package, folder / package.name, ignore=leave_out)
