"""Building a model without memory for its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["init_empty_weights", "init_on_device"]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built inside have parameters on the meta device: shapes without values or memory.

    Args:
        include_buffers: buffers too. By default they are real, for no checkpoint holds those that a model computes.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built inside have their parameters on ``device``.

    Args:
        include_buffers: buffers too.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter
    nn.Module.register_parameter = _placing(register, device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _placing(register: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """``register_parameter`` that moves what it registers. A parameter that is there already stays, tied as it is."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        if id(param) not in moved:
            options: dict[str, Any] = {**param.__dict__, "requires_grad": param.requires_grad}
            # The original is kept, so that no other one gets its id while this lasts; its memory is given back.
            moved[id(param)] = (param, type(param)(param.to(device), **options))
            if device.type == "meta" and param.untyped_storage().resizable():
                param.untyped_storage().resize_(0)
        module._parameters[name] = moved[id(param)][1]

    return register_parameter
