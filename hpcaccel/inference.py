"""Accelerate's import path for pipeline inference, which is not supported: importing a name raises an error with the
reason."""

from hpcaccel.runtime.compat.missing_names import inference as __getattr__  # noqa: F401
