"""Accelerate's import path of its checkpoints' inside. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
