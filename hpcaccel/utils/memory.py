"""Accelerate's import path of what helps against too little memory."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.out_of_memory import clear_device_cache, find_executable_batch_size, release_memory

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory"]
