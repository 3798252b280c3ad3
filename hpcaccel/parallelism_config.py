"""Accelerate's import path for ``ParallelismConfig``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.parallelism_config import ParallelismConfig

__all__ = ["ParallelismConfig"]
