"""The state dict of a model of which parts are offloaded."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.runtime.offload.aligned_devices import align_module_device, offload_hook
from hpcaccel.runtime.offload.mapped_tensors import OffloadError

__all__ = ["get_state_dict_offloaded_model"]


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model with offloaded parts, in CPU memory. Tied tensors remain tied. The model keeps its
    tensors.

    Raises:
        OffloadError: a tensor has no values.
    """
    found: dict[str, torch.Tensor] = {}
    first: dict[Hashable, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        dot, hook = f"{prefix}." if prefix else "", offload_hook(module)
        if prefix and hook is None:
            continue  # the model's own state dict has these tensors
        with nullcontext() if hook is None else align_module_device(module, "cpu"):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if not tensor.is_meta and dot + name not in found:
                    key = tensor if hook is None else hook.ties.get(name, tensor)
                    if key not in first:
                        first[key] = tensor.detach().to("cpu")
                    found[dot + name] = first[key]
    if missing := [name for name in model.state_dict() if name not in found]:
        raise OffloadError(f"these tensors are on the meta device and have no values: {shortened(missing, 5)}")
    # After the model's own names come those that only weights with values have, such as the scales of 8-bit weights.
    return {name: found[name] for name in model.state_dict()} | found
