"""Accelerate's import path of weights on disk and in host memory. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
