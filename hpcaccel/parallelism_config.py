"""Accelerate's import path of ``ParallelismConfig``."""

from hpcaccel.runtime.handlers import ParallelismConfig

__all__ = ["ParallelismConfig"]
