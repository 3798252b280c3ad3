"""Accelerate's import path for local SGD."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.gradient_sync import LocalSGD

__all__ = ["LocalSGD"]
