"""Weights of bitsandbytes' layers: placing them on a device, which quantises them, and keeping their statistics.

``Int8Params`` and ``Params4bit`` quantise themselves when they are moved to a device with values. What is needed to
compute with the quantised numbers, the *statistics*, is in the parameter's attributes, and in a state dict under names
of its own: ``<layer>.SCB`` for 8 bits, ``<layer>.weight.absmax`` and others for 4 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.offload.mapped_tensors import OffloadError

__all__ = [
    "bits_of",
    "forget_state",
    "holds_values",
    "like_quantized",
    "original_shape",
    "place_quantized",
    "scales_in",
    "with_scales",
    "without_values",
]

_BITS = {"Int8Params": 8, "Params4bit": 4, "FP4Params": 4}
_OF_VALUES = ("CB", "SCB", "quant_state", "bnb_quantized")
"""Attributes that belong to the values of a quantised parameter, not to its configuration."""


def bits_of(tensor: Any) -> int | None:
    """8 or 4 if ``tensor`` is a parameter of bitsandbytes, quantised or not; None for other tensors."""
    return _BITS.get(type(tensor).__name__)


def holds_values(weight: Any) -> bool:
    """Whether a parameter of bitsandbytes has quantised values."""
    if weight.is_meta:
        return False
    return weight.dtype == torch.int8 if bits_of(weight) == 8 else bool(getattr(weight, "bnb_quantized", False))


def original_shape(weight: Any) -> torch.Size:
    """Shape of the weight before it was quantised: 4-bit numbers are packed."""
    state = getattr(weight, "quant_state", None)
    return weight.shape if state is None else torch.Size(state.shape)


def without_values(weight: Any, data: torch.Tensor, **changed: Any) -> Any:
    """A parameter of the same class and configuration, with ``data`` and without statistics.

    Args:
        changed: attributes that differ.
    """
    made = type(weight)(data, requires_grad=weight.requires_grad and data.is_floating_point())
    empty = {name: False if name == "bnb_quantized" else None for name in _OF_VALUES if name in made.__dict__}
    made.__dict__.update(weight.__dict__, **{**empty, **changed})
    return made


def like_quantized(weight: Any, new: torch.Tensor) -> Any:
    """``new``, which are quantised numbers, as a parameter like ``weight``.

    Args:
        new: on the meta device, the parameter keeps what is needed to give it values again. Otherwise 8-bit numbers
            need their scales in the attribute ``SCB``, see ``with_scales``.
    """
    if bits_of(weight) == 8:
        scales = getattr(new, "SCB", None)
        return without_values(weight, new, **({} if new.is_meta else {"CB": new, "SCB": scales}))
    state = weight.quant_state
    if state is not None and not new.is_meta:
        # A copy: layers change the state of the weight with which they compute.
        state = copy.copy(state)
        state.state2 = copy.copy(getattr(state, "state2", None))
        state.to(new.device)
    return without_values(weight, new, quant_state=state, bnb_quantized=state is not None)


def place_quantized(
    weight: Any,
    target: torch.device,
    value: torch.Tensor | None,
    *,
    dtype: torch.dtype | None,
    scales: torch.Tensor | None,
) -> Any:
    """The parameter with which ``weight`` is replaced on the device ``target``. It is quantised there, unless it is the
    meta device.

    Args:
        value: new value: floating-point numbers, or quantised ones of the same kind; None: the present value.
        dtype: dtype to which a floating-point ``value`` is converted first; default: the present one.
        scales: the scales of the 8-bit numbers, one per row; default: the attribute ``SCB`` of ``value``.

    Raises:
        OffloadError: 8-bit numbers come without scales, or 4-bit numbers without a quantised ``weight``.
    """
    if target.type == "meta":
        data = weight.detach() if value is None else value.detach()
        return like_quantized(weight, data.to(target, dtype if data.is_floating_point() else None))
    if value is None and holds_values(weight):
        if weight.device == target:
            return weight
        value = weight.detach()
    numbers = weight.detach() if value is None else value.detach()
    if not numbers.is_floating_point():
        scales = getattr(value, "SCB", None) if scales is None else scales
        return _of_numbers(weight, numbers.to(target), scales)
    own = weight.dtype if weight.is_floating_point() else numbers.dtype
    made = without_values(weight, numbers.to(dtype or own))
    if getattr(made, "has_fp16_weights", False):
        return without_values(made, made.detach().to(target))
    return made.to(target)


def _of_numbers(weight: Any, numbers: torch.Tensor, scales: torch.Tensor | None) -> Any:
    if bits_of(weight) == 8:
        if scales is None:
            raise OffloadError("an 8-bit weight of bitsandbytes needs its scales: pass fp16_statistics")
        return without_values(weight, numbers, CB=numbers, SCB=scales.to(numbers.device))
    if weight.quant_state is None:
        raise OffloadError(
            f"4-bit numbers ({numbers.dtype}) for a weight that is not quantised: pass floating-point values"
        )
    return like_quantized(weight, numbers)


def with_scales(numbers: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Give 8-bit numbers their scales, as the attribute ``SCB``.

    Args:
        weights: has the scales under the name ``SCB`` beside the weight's.
        name: the weight's name in ``weights``.
    """
    scales = weights.get(f"{name.removesuffix('weight')}SCB")
    if scales is not None:
        numbers.SCB = scales.detach().to(numbers.device)  # type: ignore[attr-defined]
    return numbers


def scales_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Scales of the 8-bit layers in ``module``, as in its state dict."""
    found = {}
    for name, part in module.named_modules():
        if bits_of(part._parameters.get("weight")) == 8:
            scales = getattr(part.weight, "SCB", None)
            scales = getattr(part.state, "SCB", None) if scales is None else scales
            if scales is not None:
                found[f"{name}.SCB" if name else "SCB"] = scales
    return found


def forget_state(module: nn.Module) -> None:
    """Remove the numbers and scales that the 8-bit layers in ``module`` took over from their weights during
    ``forward``."""
    for part in module.modules():
        if type(part).__name__ == "Linear8bitLt":
            state: Any = part.state
            state.CB = state.SCB = None
