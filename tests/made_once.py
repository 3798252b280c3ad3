"""Slow setup shared by many tests: the first worker of pytest-xdist creates it, the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> tuple[Path, str]:
    """Call ``make`` once per session; return the folder that it filled and its result."""
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
