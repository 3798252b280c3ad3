"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.optim import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
