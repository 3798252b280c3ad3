"""Accelerate's import path for checkpoint functions, none of which is supported: importing one raises an error with
the replacement."""

from hpcaccel.runtime.compat.missing_names import checkpointing as __getattr__  # noqa: F401
