"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
