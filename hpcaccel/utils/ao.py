"""Accelerate's import path of fp8 through torchao. Names say what takes their place."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
