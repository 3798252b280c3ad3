"""Accelerate's older import path for ``find_executable_batch_size``."""

from hpcaccel.runtime.compat.missing_names import memory_utils as __getattr__  # noqa: F401
from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
