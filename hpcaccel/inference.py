"""Accelerate's import path of pipelines over GPUs. Names say what takes their place."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
