"""Accelerate's import path for functions that write and read its files of a training. ``Accelerator.save_state`` writes
hpcaccel's own checkpoints."""

from hpcaccel.runtime.compat.accelerator_files import load_accelerator_state as load_accelerator_state
from hpcaccel.runtime.compat.accelerator_files import load_custom_state as load_custom_state
from hpcaccel.runtime.compat.accelerator_files import save_accelerator_state as save_accelerator_state
from hpcaccel.runtime.compat.accelerator_files import save_custom_state as save_custom_state
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = ["load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"]
