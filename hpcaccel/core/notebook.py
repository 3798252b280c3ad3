"""Whether this process is the kernel of a Jupyter notebook, without importing IPython."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["notebook_shell"]


def notebook_shell() -> Any | None:
    """IPython's shell object if this process is a Jupyter kernel; None elsewhere, as in ``ipython`` in a terminal."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return shell if hasattr(shell, "kernel") else None
