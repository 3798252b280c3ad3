"""Accelerate's import path of assertions."""

from hpcaccel.runtime.compat.absent_aids import __getattr__ as __getattr__
from hpcaccel.runtime.compat.test_aids import are_the_same_tensors, assert_exception, torch_device

__all__ = ["are_the_same_tensors", "assert_exception", "torch_device"]
