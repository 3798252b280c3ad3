"""Accelerate's import path for local SGD."""

from hpcaccel.runtime.compat.missing_names import local_sgd as __getattr__  # noqa: F401
from hpcaccel.runtime.training.gradient_sync import LocalSGD

__all__ = ["LocalSGD"]
