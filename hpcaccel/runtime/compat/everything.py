"""``__getattr__`` of ``hpcaccel.accelerator``: Accelerate's module of that name has all that it uses itself, and
scripts take it from there."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from hpcaccel.runtime.compat.unsupported import refuse

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        for page in ("hpcaccel.utils", "hpcaccel"):
            if name in getattr(import_module(page), "__all__", ()) or name in vars(sys.modules[page]):
                return getattr(sys.modules[page], name)
    refuse(name)
