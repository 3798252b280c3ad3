"""Accelerate's import path for prepared schedulers."""

from hpcaccel.runtime.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
