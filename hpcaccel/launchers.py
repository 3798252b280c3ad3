"""Accelerate's import path for the launchers; see ``hpcaccel.runtime.local_launch``."""

from hpcaccel.runtime.compat.launched_process import test_launch as test_launch
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.local_launch import debug_launcher as debug_launcher
from hpcaccel.runtime.local_launch import notebook_launcher as notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
