"""Accelerate's import path of assertions."""

from hpcaccel.runtime.compat.test_aids import are_the_same_tensors, assert_exception, torch_device
from hpcaccel.runtime.compat.unsupported_test_utils import __getattr__ as __getattr__

__all__ = ["are_the_same_tensors", "assert_exception", "torch_device"]
