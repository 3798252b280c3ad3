"""Accelerate's import path of a tiny regression."""

from hpcaccel.runtime.compat.test_aids import RegressionDataset, RegressionModel
from hpcaccel.runtime.compat.unsupported_test_utils import __getattr__ as __getattr__

__all__ = ["RegressionDataset", "RegressionModel"]
