"""Batches on the rank's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["mover", "to_device"]


def mover(device: torch.device, *, non_blocking: bool) -> Callable[[Any], Any] | None:
    """What moves a batch to ``device``; None where nothing has to move."""
    if device.type == "cpu":
        return None
    return lambda batch: to_device(batch, device, non_blocking=non_blocking)


def to_device(value: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Nested tensors on ``device``, containers of the same types. An object with a ``to`` of its own moves itself."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    kind = type(value)
    if kind is dict:
        return {key: to_device(item, device, non_blocking=non_blocking) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(to_device(item, device, non_blocking=non_blocking) for item in value)
    if callable(getattr(value, "to", None)):
        return _moved_by_itself(value, device, non_blocking=non_blocking)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(to_device(item, device, non_blocking=non_blocking) for item in value))
    if isinstance(value, list | tuple):
        return kind(to_device(item, device, non_blocking=non_blocking) for item in value)
    if isinstance(value, Mapping):
        return kind({key: to_device(item, device, non_blocking=non_blocking) for key, item in value.items()})
    return value


def _moved_by_itself(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # its ``to`` takes a device only
        return value.to(device)
