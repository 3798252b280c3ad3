"""Accelerate's import path for module hooks, none of which is supported: importing one raises an error that
gives the reason."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
