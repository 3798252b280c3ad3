"""Accelerate's import path of a tiny regression."""

from hpcaccel.runtime.compat.absent_aids import __getattr__ as __getattr__
from hpcaccel.runtime.compat.test_aids import RegressionDataset, RegressionModel

__all__ = ["RegressionDataset", "RegressionModel"]
