"""Accelerate's import path for ``get_logger``; see ``hpcaccel.runtime.rank_logger``."""

from hpcaccel.runtime.compat.missing_names import logging as __getattr__  # noqa: F401
from hpcaccel.runtime.rank_logger import MultiProcessAdapter as MultiProcessAdapter
from hpcaccel.runtime.rank_logger import get_logger as get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
