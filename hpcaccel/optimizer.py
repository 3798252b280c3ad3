"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.optim import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
