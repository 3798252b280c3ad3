"""Accelerate's older import path for ``find_executable_batch_size``."""

from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = ["find_executable_batch_size"]
