"""Accelerate's import path of the launchers, which live in ``hpcaccel.runtime.ranks.launching``."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.ranks.launching import debug_launcher as debug_launcher
from hpcaccel.runtime.ranks.launching import notebook_launcher as notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
