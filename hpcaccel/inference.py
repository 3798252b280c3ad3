"""Accelerate's import path of pipeline inference. No name is supported: each raises an error with the reason."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
