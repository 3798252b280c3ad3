"""Weights that are stored in one dtype and used in another: fewer bytes between the layers' ``forward`` calls."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.offload.module_hooks import ModelHook, add_hook_to_module, outside_compiled_code

__all__ = ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
"""Layers that ``attach_layerwise_casting_hooks`` casts."""


class LayerwiseCastingHook(ModelHook):
    """Stores the weights of a module in one dtype, and computes in another.

    Args:
        storage_dtype: dtype of the weights outside of ``forward``.
        compute_dtype: dtype of the weights inside ``forward``.
        non_blocking: whether the casts are asynchronous, where the device can do this.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_compiled_code
    def undo_pre_forward(self, module: nn.Module) -> None:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.undo_pre_forward(module)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Attach a ``LayerwiseCastingHook`` to each linear and convolutional layer of a model.

    Args:
        skip_modules_pattern: regular expressions; a module whose name contains a match, and all modules inside it, keep
            their dtype.
        skip_modules_classes: modules of these classes, and all modules inside them, keep their dtype.
        non_blocking: whether the casts are asynchronous, where the device can do this.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for child_name, child in part.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
