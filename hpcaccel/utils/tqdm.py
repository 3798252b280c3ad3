"""Accelerate's import path of the progress bar."""

from hpcaccel.runtime.compat.bars import tqdm
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = ["tqdm"]
