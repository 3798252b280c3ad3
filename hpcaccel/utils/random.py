"""Accelerate's import path of random number generators."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.determinism import set_seed

__all__ = ["set_seed"]
