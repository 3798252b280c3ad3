"""Comparing versions of installed packages."""

from __future__ import annotations

import operator
from importlib import metadata
from typing import Any

import torch
from torch.torch_version import TorchVersion

from hpcaccel.errors import RuntimeMisuse

__all__ = ["compare_versions", "is_torch_version"]

OPERATORS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether an installed package (by its name) or a version stands so to another version.

    Raises:
        RuntimeMisuse: an operation other than ``> >= == != <= <``.
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    if operation not in OPERATORS:
        raise RuntimeMisuse(f"compare_versions(operation={operation!r}) is not one of {' '.join(OPERATORS)}")
    if isinstance(library_or_version, str) and not library_or_version[:1].isdigit():
        library_or_version = metadata.version(library_or_version)
    return bool(OPERATORS[operation](TorchVersion(str(library_or_version)), TorchVersion(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version stands so to ``version``; what comes after a ``+`` does not count."""
    return compare_versions(torch.__version__.partition("+")[0], operation, version)
