"""Tensors that are spread over ranks, without importing torch's module for them (a third of a second) to ask."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["full", "is_dtensor"]


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor. Nobody can have one before the module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, for which all of its ranks must call; any other tensor as it is."""
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole
