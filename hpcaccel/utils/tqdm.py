"""Accelerate's import path of the progress bar."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.bars import tqdm

__all__ = ["tqdm"]
