"""The random generator of a device, of any vendor: a pair of functions that read and write its state as a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

__all__ = ["device_generator"]

Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]


def device_generator(device: torch.device | str | None) -> Generator | None:
    """The functions ``(read, write)`` of the device's generator; None for the CPU, and for devices without a generator.

    torch's modules of devices (``torch.cuda``, ``torch.xpu``, a vendor's module) have ``get_rng_state(device)`` and
    ``set_rng_state(state, device)``. MPS has a single device and takes none. XLA's state is a number.
    """
    if device is None or (kind := torch.device(device).type) in ("cpu", "meta"):
        return None
    if kind == "xla":
        model: Any = import_module("torch_xla.core.xla_model")
        return lambda: torch.tensor(model.get_rng_state(str(device))), partial(_write_number, model, str(device))
    module: Any = torch.get_device_module(kind)
    if kind == "mps":
        return module.get_rng_state, module.set_rng_state
    if not hasattr(module, "get_rng_state"):
        return None
    return partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)


def _write_number(model: Any, device: str, state: torch.Tensor) -> None:
    model.set_rng_state(int(state), device)
