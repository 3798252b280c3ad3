"""Accelerate's import path of the command that writes a configuration file. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported_commands import __getattr__ as __getattr__
