"""Linear layers of bitsandbytes that replace torch's, and their configuration."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.introspection import find_tied_parameters
from hpcaccel.runtime.enums import CustomDtype
from hpcaccel.runtime.offload.quantized_tensors import bits_of, without_values

__all__ = [
    "BnbQuantizationConfig",
    "get_keys_to_not_convert",
    "has_4bit_bnb_layers",
    "is_one_of",
    "replace_with_bnb_layers",
]

log = logging.getLogger(__name__)

_COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class QuantizationError(RuntimeMisuse, ValueError):
    """A field of a ``BnbQuantizationConfig`` has a value that is not allowed. Accelerate raises ValueError."""


@dataclass
class BnbQuantizationConfig:
    """How ``load_and_quantize_model`` quantises linear layers: to 8 or to 4 bits.

    Args:
        llm_int8_threshold: with 8 bits, columns of the inputs with a larger absolute value are multiplied in fp16.
        bnb_4bit_quant_type: ``fp4`` or ``nf4``.
        bnb_4bit_use_double_quant: whether the statistics of 4-bit weights are quantised, too.
        bnb_4bit_compute_dtype: ``fp32``, ``fp16``, ``bf16`` or torch's dtype, in which 4-bit layers compute.
        torch_dtype: dtype of the other weights, and of weights before they are quantised; default: the model's.
        skip_modules: names of modules that are not quantised; default: the last module, and modules with tied weights.
        keep_in_fp32_modules: names of modules that are not quantised and are in fp32.

    Raises:
        QuantizationError: a value is not allowed; it is a ValueError.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: torch.dtype | CustomDtype = field(init=False, repr=False)
    """Dtype of the quantised weights, for ``infer_auto_device_map``."""

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "load_in_8bit": (bool, "a bool"),
            "load_in_4bit": (bool, "a bool"),
            "llm_int8_threshold": ((int, float), "a number"),
            "bnb_4bit_use_double_quant": (bool, "a bool"),
            "torch_dtype": ((torch.dtype, type(None)), "a torch.dtype or None"),
            "skip_modules": ((list, type(None)), "a list of names or None"),
            "keep_in_fp32_modules": ((list, type(None)), "a list of names or None"),
        }
        for name, (kind, text) in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise _wrong(self, name, text)
        if self.load_in_8bit == self.load_in_4bit:
            raise QuantizationError(
                f"BnbQuantizationConfig(load_in_8bit={self.load_in_8bit}, load_in_4bit={self.load_in_4bit}): exactly "
                "one of the two must be True"
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise _wrong(self, "bnb_4bit_quant_type", "'fp4' or 'nf4'")
        given = self.bnb_4bit_compute_dtype
        dtype = _COMPUTE_DTYPES.get(given) if isinstance(given, str) else given
        if not isinstance(dtype, torch.dtype):
            raise _wrong(self, "bnb_4bit_compute_dtype", "'fp32', 'fp16', 'bf16' or a torch.dtype")
        self.bnb_4bit_compute_dtype = dtype
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8


def _wrong(config: BnbQuantizationConfig, name: str, allowed: str) -> QuantizationError:
    return QuantizationError(f"BnbQuantizationConfig({name}={getattr(config, name)!r}): it must be {allowed}")


def is_one_of(name: str, entries: Collection[str]) -> bool:
    """Whether an entry names a module, or a module around it: by its full name or by a part of it (``fc`` names
    ``layers.0.fc``)."""
    return any(f".{entry}." in f".{name}." for entry in entries)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Collection[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace linear layers, in place, with layers of bitsandbytes that have the same weights, not yet quantised.

    Args:
        modules_to_not_convert: names of modules that are left as they are.
        current_key_name: the names of the modules around ``model``.

    Returns:
        The same model.
    """
    around = "".join(f"{name}." for name in current_key_name or ())
    linear = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if name
        and isinstance(module, nn.Linear)
        # Attention of torch uses the weights of this class without calling it.
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and not bits_of(module.weight)
        and not is_one_of(around + name, modules_to_not_convert or ())
    ]
    if not linear:
        done = any(bits_of(parameter) for parameter in model.parameters())
        state = "is quantised already" if done else "has no linear layers that could be quantised"
        log.warning("%s %s", type(model).__name__, state)
    made = {module: _quantized_layer(module, bnb_quantization_config) for module in {one for _, one in linear}}
    for name, module in linear:
        model.set_submodule(name, made[module])
    return model


def _quantized_layer(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    import bitsandbytes

    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    made: Any
    layers: Any = bitsandbytes.nn
    if config.load_in_8bit:
        made = layers.Linear8bitLt(
            *sizes, bias, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta"
        )
    else:
        made = layers.Linear4bit(
            *sizes,
            bias,
            config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device="meta",
        )
    made.weight = without_values(made.weight, linear.weight.detach())
    if bias:
        made.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    made.requires_grad_(False)
    made.train(linear.training)
    return made  # type: ignore[no-any-return]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that are not quantised by default: those with tied weights, and the last module, which
    usually computes the outputs. Empty for a transformers model without a head and tied weights."""
    tied = sorted({name for group in find_tied_parameters(model) for name in group})
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    names = [name.removesuffix(".weight").removesuffix(".bias") for name in tied]
    last = [name for name, _ in model.named_children()][-1:]
    return [*names, *(name for name in last if name not in names)]


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether the model has a ``Linear4bit`` of bitsandbytes."""
    return any(
        isinstance(module, nn.Linear) and any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__)
        for module in model.modules()
    )
