"""Mixed precision: autocast around the forward, fp32 outputs so that losses outside the model keep their precision,
and fp8 linear layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.forward_wrappers import ForwardWrapper, put_around, take_off

__all__ = [
    "COMPUTE_DTYPES",
    "Autocasted",
    "autocast",
    "convert_to_fp8",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "map_tensors",
    "refuse_fp8",
    "to_fp32",
    "unwrap_forward",
    "wrap_forward",
]

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Autocast's dtype by precision. With fp8 it applies to everything except the fp8 linear layers."""
_HALF = (torch.bfloat16, torch.float16)


def autocast(
    device: torch.device, mixed_precision: str, handler: Any = None, *, enabled: bool = True
) -> torch.autocast:
    """The autocast context of this precision. ``no`` has torch's default dtype for the device.

    Args:
        handler: an ``AutocastKwargs``, or None. Its ``enabled`` may disable the context, too.
    """
    return torch.autocast(**_options(device, mixed_precision, handler, enabled=enabled))


def _options(device: torch.device, mixed_precision: str, handler: Any, *, enabled: bool = True) -> dict[str, Any]:
    """Arguments of ``torch.autocast``."""
    return {
        "device_type": device.type,
        "dtype": COMPUTE_DTYPES.get(mixed_precision),
        "enabled": enabled and (handler is None or handler.enabled),
        "cache_enabled": None if handler is None else handler.cache_enabled,
    }


class Autocasted(ForwardWrapper):
    """A forward under autocast. With ``fp32_outputs``, half-precision outputs are converted to fp32."""

    def __init__(self, inner: Callable[..., Any], options: dict[str, Any], *, fp32_outputs: bool) -> None:
        super().__init__(inner)
        self.options = options
        self.fp32_outputs = fp32_outputs
        self._unused: dict[bool, list[torch.autocast]] = {False: [], True: []}
        """Contexts of finished calls, by the setting of autocast's cache with which they were made. Making a context
        takes a quarter of the time that autocast adds to a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A context of its own for each call that is not finished: a shared one would break if the model calls itself.
        if torch.compiler.is_compiling():
            with torch.autocast(**self.options):
                outputs = self.inner(*args, **kwargs)
        else:
            unused = self._unused[torch.is_autocast_cache_enabled()]
            context = unused.pop() if unused else torch.autocast(**self.options)
            with context:
                outputs = self.inner(*args, **kwargs)
            unused.append(context)
        return to_fp32(outputs) if self.fp32_outputs else outputs

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_unused"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _unused={False: [], True: []})


def wrap_forward(
    model: nn.Module, device: torch.device, mixed_precision: str, *, handler: Any = None, fp32_outputs: bool = True
) -> None:
    """Wrap the forward of this ``model`` instance in ``Autocasted``. The forward of its class is unchanged."""
    options = _options(device, mixed_precision, handler)
    take_off(model, Autocasted)
    put_around(model, lambda inner: Autocasted(inner, options, fp32_outputs=fp32_outputs))


def unwrap_forward(model: nn.Module) -> None:
    """Remove ``Autocasted`` from the model's forward."""
    take_off(model, Autocasted)


def to_fp32(outputs: Any) -> Any:
    """Convert half-precision tensors in nested containers to fp32; other values are returned unchanged."""
    kind = type(outputs)
    if kind is torch.Tensor:
        return outputs.float() if outputs.dtype in _HALF else outputs
    if kind is dict:
        return {key: to_fp32(item) for key, item in outputs.items()}
    if kind is tuple:
        return tuple([to_fp32(item) for item in outputs])
    return map_tensors(outputs, _to_fp32)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def map_tensors(value: Any, function: Any) -> Any:
    """Apply ``function`` to every tensor in nested lists, tuples, mappings and dataclasses, whose types are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


LEAST_CAPABILITY = (8, 9)
"""Compute capability of Ada GPUs. Earlier GPUs have no 8-bit floating point."""


def refuse_fp8(device: torch.device, handler: Any = None) -> None:
    """Check that fp8 is available on ``device``.

    Args:
        handler: an ``AORecipeKwargs``, or None.

    Raises:
        RuntimeMisuse: the device does not support fp8, torchao is not installed, or the handler is for another backend.
    """
    if handler is not None and type(handler).__name__ != "AORecipeKwargs":
        raise RuntimeMisuse(
            f"fp8 with {type(handler).__name__} is not supported, only fp8 with torchao: pass AORecipeKwargs(), or no "
            "fp8 handler"
        )
    if device.type != "cuda":
        raise RuntimeMisuse(
            f"mixed_precision=fp8 needs a GPU with compute capability 8.9 or higher (Ada, Hopper), but this rank "
            f"trains on {device.type}. Use bf16"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise RuntimeMisuse(
            "mixed_precision=fp8 needs a GPU with compute capability 8.9 or higher (Ada, Hopper), but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use bf16"
        )
    if find_spec("torchao") is None:
        raise RuntimeMisuse("mixed_precision=fp8 needs torchao, which is not installed: pip install torchao")


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the first and the last linear layer; None for both if there are none."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (linears[0], linears[-1]) if linears else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Whether a layer may compute in fp8: it is not in ``layers_to_filter``, and the sizes of a linear layer are
    multiples of 16.

    Args:
        fqn: the layer's full name.
        layers_to_filter: names of layers that must not.
    """
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
    return fqn not in layers_to_filter and all(size % 16 == 0 for size in sizes)


def convert_to_fp8(model: nn.Module, handler: Any = None) -> nn.Module:
    """Replace linear layers with fp8 layers, in place.

    By default these are the layers whose sizes are multiples of 16, as fp8 kernels require, except the model's first
    and last linear layers, whose rounding errors have the largest effect.

    Args:
        handler: an ``AORecipeKwargs`` with torchao's ``config`` or some of its fields, and a filter that selects
            layers; or None.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    edge = find_first_last_linear_layers(model)

    def suits(module: nn.Module, name: str) -> bool:
        return filter_linear_layers(module, name, edge)

    config = getattr(handler, "config", None)
    fields = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
    options = {name: getattr(handler, name) for name in fields if getattr(handler, name, None) is not None}
    if config is None and options:
        config = Float8LinearConfig(**options)
    converted: nn.Module = convert_to_float8_training(
        model, module_filter_fn=getattr(handler, "module_filter_func", None) or suits, config=config
    )
    return converted
