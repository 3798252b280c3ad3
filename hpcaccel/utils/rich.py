"""Accelerate's import path for tracebacks by rich: importing this module enables them."""

from hpcaccel.runtime.compat.rich_tracebacks import install as install

__all__ = ["install"]
