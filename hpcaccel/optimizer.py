"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.compat.standalone import move_to_device as move_to_device
from hpcaccel.runtime.compat.standalone import patch_optimizer_step as patch_optimizer_step
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"]
