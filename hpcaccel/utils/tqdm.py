"""Accelerate's import path of the progress bar."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.compat.bars import tqdm

__all__ = ["tqdm"]
