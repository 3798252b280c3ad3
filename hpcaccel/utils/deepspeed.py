"""Accelerate's import path of DeepSpeed, which is not here: two names to compare with, and reasons for the others."""

from hpcaccel.runtime.compat.placeholders import DummyOptim, DummyScheduler
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = ["DummyOptim", "DummyScheduler"]
