"""Accelerate's import path for prepared schedulers."""

from hpcaccel.runtime.compat.missing_names import scheduler as __getattr__  # noqa: F401
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
