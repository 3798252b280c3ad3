"""Accelerate's import path of versions."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.compat.version_checks import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
