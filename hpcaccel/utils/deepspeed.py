"""Accelerate's import path of DeepSpeed, which is not here: two names to compare with, and reasons for the others."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.compat.placeholders import DummyOptim, DummyScheduler

__all__ = ["DummyOptim", "DummyScheduler"]
