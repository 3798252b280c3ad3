"""Accelerate's import path for prepared schedulers."""

from hpcaccel.runtime.training.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
