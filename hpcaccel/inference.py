"""Accelerate's import path of pipelines over GPUs. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
