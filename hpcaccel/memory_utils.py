"""An older import path of Accelerate's."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.out_of_memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
