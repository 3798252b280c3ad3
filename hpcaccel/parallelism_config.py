"""Accelerate's import path for ``ParallelismConfig``."""

from hpcaccel.runtime.compat.missing_names import parallelism_config as __getattr__  # noqa: F401
from hpcaccel.runtime.handlers import ParallelismConfig

__all__ = ["ParallelismConfig"]
