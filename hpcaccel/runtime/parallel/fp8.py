"""fp8: linear layers multiply in 8-bit floating point, by torchao. Everything else computes in bf16.

Nothing here has run on a machine with such hardware; it follows torchao's documentation.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse

__all__ = ["check", "convert"]

LEAST_CAPABILITY = (8, 9)
"""Ada and Hopper; earlier GPUs have no 8-bit floating point."""


def check(device: torch.device, handler: Any = None) -> None:
    """
    Args:
        handler: an ``AORecipeKwargs``, or None.

    Raises:
        RuntimeMisuse: the hardware or torchao is missing, or another backend is asked for.
    """
    if handler is not None and type(handler).__name__ != "AORecipeKwargs":
        raise RuntimeMisuse(
            f"fp8 with {type(handler).__name__}: only torchao's recipe is here. Give AORecipeKwargs() or nothing"
        )
    if device.type != "cuda":
        raise RuntimeMisuse(
            f"mixed_precision=fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper); this rank trains on "
            f"{device.type}. Use bf16"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise RuntimeMisuse(
            f"mixed_precision=fp8 needs compute capability 8.9 or newer (Ada, Hopper); "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use bf16"
        )
    if find_spec("torchao") is None:
        raise RuntimeMisuse("mixed_precision=fp8 needs torchao, which is not installed: pip install torchao")


def convert(model: nn.Module, handler: Any = None) -> nn.Module:
    """Exchange the linear layers, in place: by default those whose sizes fp8 kernels can multiply (multiples of 16),
    the first and the last one excepted, whose errors cost most.

    Args:
        handler: an ``AORecipeKwargs``: torchao's ``config``, or single fields of it, and which layers to exchange.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    edge = {linears[0], linears[-1]} if linears else set()

    def suits(module: nn.Module, name: str) -> bool:
        sizes = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return name not in edge and all(size % 16 == 0 for size in sizes)

    config = getattr(handler, "config", None)
    fields = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
    told = {name: getattr(handler, name) for name in fields if getattr(handler, name, None) is not None}
    if config is None and told:
        config = Float8LinearConfig(**told)
    converted: nn.Module = convert_to_float8_training(
        model, module_filter_fn=getattr(handler, "module_filter_func", None) or suits, config=config
    )
    return converted
