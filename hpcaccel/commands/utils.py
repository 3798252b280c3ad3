"""Accelerate's import path of what its commands share. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported_commands import __getattr__ as __getattr__
