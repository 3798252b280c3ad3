"""Accelerate's import path for ``get_logger``; see ``hpcaccel.runtime.rank_logger``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.rank_logger import MultiProcessAdapter as MultiProcessAdapter
from hpcaccel.runtime.rank_logger import get_logger as get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
