"""From one YAML file to a model trained, preempted and resumed on a Slurm cluster.

The names below are the public surface. They are imported when they are first used, so that ``import hpcaccel`` costs
nothing on a login node and never brings torch along.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.errors import HpcaccelError as HpcaccelError
    from hpcaccel.runtime.accelerator import Accelerator as Accelerator
    from hpcaccel.spec import JobSpec as JobSpec
    from hpcaccel.spec import load_spec as load_spec
    from hpcaccel.submission import Run as Run
    from hpcaccel.submission import find_run as find_run
    from hpcaccel.submission.submit import submit as submit

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "hpcaccel.runtime.accelerator",
    "HpcaccelError": "hpcaccel.errors",
    "JobSpec": "hpcaccel.spec",
    "Run": "hpcaccel.submission",
    "find_run": "hpcaccel.submission",
    "load_spec": "hpcaccel.spec",
    "submit": "hpcaccel.submission.submit",
}

_EXTRA = {"numpy": "train", "torch": "train"}

__all__ = ["Accelerator", "HpcaccelError", "JobSpec", "Run", "find_run", "load_spec", "submit"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpcaccel' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"hpcaccel.{name} needs {error.name}, which {sys.executable} does not have: "
            f"pip install 'hpcaccel[{_EXTRA[error.name]}]'",
            name=error.name,
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
