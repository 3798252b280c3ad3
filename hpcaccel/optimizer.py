"""Accelerate's import path for prepared optimizers."""

from hpcaccel.runtime.compat.missing_names import optimizer as __getattr__  # noqa: F401
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
