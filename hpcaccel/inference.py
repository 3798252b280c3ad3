"""Accelerate's import path for pipeline inference, which is not supported: importing a name raises an error with the
reason."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
