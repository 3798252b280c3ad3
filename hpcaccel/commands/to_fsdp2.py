"""Accelerate's import path of the command that converts a configuration file. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported_commands import __getattr__ as __getattr__
