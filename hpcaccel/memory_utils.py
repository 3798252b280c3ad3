"""An older import path of Accelerate's."""

from hpcaccel.runtime.training.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
