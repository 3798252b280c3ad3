"""Accelerate's import path for module hooks, none of which is supported: importing one raises an error with the
reason."""

from hpcaccel.runtime.compat.missing_names import hooks as __getattr__  # noqa: F401
