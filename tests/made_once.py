"""What takes long and serves many tests, made by whichever worker of pytest-xdist comes first; the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> tuple[Path, str]:
    """The folder that ``make`` filled, and what it returned."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, said = root / name, root / f"{name}.said"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            folder.mkdir(exist_ok=True)
            text = make(folder)
            said.write_text(text)
    return folder, said.read_text()
