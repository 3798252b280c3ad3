"""Accelerate's import path of ``get_logger``, which lives in ``hpcaccel.runtime.log``."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.log import MultiProcessAdapter as MultiProcessAdapter
from hpcaccel.runtime.log import get_logger as get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
