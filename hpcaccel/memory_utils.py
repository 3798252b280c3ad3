"""An older import path of Accelerate's."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.training.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
