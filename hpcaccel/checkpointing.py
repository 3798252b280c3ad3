"""Accelerate's import path for checkpoint functions, none of which is supported: importing one raises an error that
names the replacement."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
