"""Accelerate's import path of versions."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.compat.versions import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
