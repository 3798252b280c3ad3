"""Whether the packages are there that a method needs: asked before anything is submitted, without importing them."""

from __future__ import annotations

import importlib.util
import sys

from hpcaccel.errors import UserError

__all__ = ["check_packages"]

_NEEDS = {"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}


def check_packages(method: str) -> None:
    """Raises UserError where this Python, which is that of the workers too, lacks something that ``method`` needs."""
    needed = ["optuna", *_NEEDS.get(method, [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "hpcaccel[sweep,train]" if "torch" in missing else "hpcaccel[sweep]"
        raise UserError(
            f"sweep.method {method} needs {' and '.join(missing)}, which {sys.executable} does not have: "
            f"pip install '{extra}'"
        )
