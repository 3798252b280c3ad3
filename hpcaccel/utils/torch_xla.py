"""Accelerate's import path of TPUs. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
