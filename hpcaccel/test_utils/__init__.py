"""Accelerate's import path of aids for tests. Most of them guard Accelerate's own tests, and say so when imported."""

from hpcaccel.runtime.compat.test_aids import (
    RegressionDataset,
    RegressionModel,
    are_the_same_tensors,
    assert_exception,
    torch_device,
)
from hpcaccel.runtime.compat.unsupported_test_utils import __getattr__ as __getattr__

__all__ = ["RegressionDataset", "RegressionModel", "are_the_same_tensors", "assert_exception", "torch_device"]
