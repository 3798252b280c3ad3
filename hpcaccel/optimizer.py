"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.training.optim import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
