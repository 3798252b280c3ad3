"""Accelerate's import path of its checkpoint functions. No name is supported: each raises an error with the
replacement."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
