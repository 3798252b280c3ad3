"""What a nested value looks like: types, keys and shapes as a line of text, the same on ranks whose values agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["form_of", "tensor_form", "tensor_kind"]


def tensor_form(tensor: torch.Tensor) -> str:
    """``float32[4, 3]``; on another device than the CPU ``cuda float32[4, 3]``."""
    return f"{tensor_kind(tensor)}{list(tensor.shape)}"


def tensor_kind(tensor: torch.Tensor) -> str:
    """``float32``, whatever the shape."""
    device = "" if tensor.device.type == "cpu" else f"{tensor.device.type} "
    return f"{device}{str(tensor.dtype)[6:]}"


def form_of(value: Any, leaf: Callable[[torch.Tensor], str] = tensor_form) -> str:
    """The form of tensors in nested lists, tuples and mappings; other things count by their type alone."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(form_of(item, leaf) for item in value)})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {form_of(item, leaf)}" for key, item in value.items())
        return f"{type(value).__name__}({items})"
    return type(value).__name__
