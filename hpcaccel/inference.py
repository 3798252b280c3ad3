"""Accelerate's import path for pipeline inference, which is not supported: importing any name raises an error
that gives the reason."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
