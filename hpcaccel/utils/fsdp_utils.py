"""Accelerate's import path of what is inside of FSDP. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
