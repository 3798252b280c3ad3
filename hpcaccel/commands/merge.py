"""Accelerate's import path of the command that joins sharded weights. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported_commands import __getattr__ as __getattr__
