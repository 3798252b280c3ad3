"""Accelerate's import path for prepared schedulers."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
