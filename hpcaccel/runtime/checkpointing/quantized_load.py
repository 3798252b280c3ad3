"""Loading a model whose linear layers are quantised to 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_in_model
from hpcaccel.runtime.compat.availability import require
from hpcaccel.runtime.compat.introspection import named_module_tensors
from hpcaccel.runtime.offload.device_map import resolve_device_map
from hpcaccel.runtime.offload.device_memory import as_device, default_device
from hpcaccel.runtime.offload.dispatch import dispatch_model
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.model_parts import check_module, warn_of_unknown
from hpcaccel.runtime.offload.quantized_layers import (
    BnbQuantizationConfig,
    get_keys_to_not_convert,
    is_one_of,
    replace_with_bnb_layers,
)
from hpcaccel.runtime.offload.quantized_tensors import bits_of

__all__ = ["load_and_quantize_model"]

AT_LEAST = "0.49"
"""Version of bitsandbytes; the results of some earlier ones in 8 bits are wrong on CPUs."""


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: Mapping[int | str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantise the linear layers of a model with bitsandbytes. A model on the meta device gets its weights from files,
    one at a time; one with weights is quantised in place and moved to the accelerator, or to the CPU if there is none.

    In 8 bits, offloaded parts are quantised, too. In 4 bits, modules that a device map offloads are not quantised
    and have ``torch_dtype``.

    Args:
        weights_location: for a model on the meta device: a file, an ``.index.json``, or a directory with either. The
            weights may be quantised already, as ``save_model`` writes those of a quantised model.
        device_map: as in ``load_checkpoint_and_dispatch``; default: the whole model on the accelerator, or on the CPU
            if there is none. ``"cpu"`` in a map without accelerators means that these parts compute on the CPU.
        no_split_module_classes, max_memory: as in ``infer_auto_device_map``, for a computed map.
        offload_folder: for the parts on disk.
        offload_state_dict: accepted for Accelerate's scripts, without effect.

    Returns:
        The same model.

    Raises:
        PackageMissing: bitsandbytes is not installed, or too old; it is an ImportError.
        RuntimeMisuse: a model on the meta device has no ``weights_location``; an argument has a wrong type.
        OffloadError: a computed map offloads parts of a model in 4 bits, or there is no folder for parts on disk.
        CheckpointError: the files cannot be read; they have no values for some weights; shapes differ.
    """
    check_module(model, "load_and_quantize_model(model, bnb_quantization_config)")
    _check_config(bnb_quantization_config)
    require("bitsandbytes", "load_and_quantize_model()", install=f"'bitsandbytes>={AT_LEAST}'", at_least=AT_LEAST)
    config = bnb_quantization_config
    kept = list(config.keep_in_fp32_modules or ())
    for field in ("skip_modules", "keep_in_fp32_modules"):
        _warn_of_unknown_modules(model, field, getattr(config, field) or ())
    skipped = [*(get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules), *kept]
    if config.load_in_4bit and isinstance(device_map, Mapping) and len(device_map) > 1:
        skipped += _offloaded(device_map)
    attributes: Any = model  # PEFT reads these
    attributes.is_loaded_in_4bit, attributes.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    if not next(model.parameters()).is_meta:
        return _quantize_in_place(model, config, skipped, kept)
    if weights_location is None:
        raise RuntimeMisuse(
            "load_and_quantize_model(): the model was created on the meta device and has no weights. Pass the files "
            "with its weights as weights_location"
        )
    replace_with_bnb_layers(model, config, skipped)
    places = _places(model, config, device_map, no_split_module_classes, max_memory, skipped, kept)
    load_checkpoint_in_model(
        model, weights_location, places, offload_folder, config.torch_dtype, keep_in_fp32_modules=kept
    )
    _refuse_empty(model, places, weights_location)
    return dispatch_model(model, places, offload_dir=offload_folder)


def _check_config(config: Any) -> None:
    # Accelerate's class of this name has the same fields.
    if all(kind.__name__ != BnbQuantizationConfig.__name__ for kind in type(config).__mro__):
        raise RuntimeMisuse(
            "load_and_quantize_model(): bnb_quantization_config must be a BnbQuantizationConfig, such as "
            f"BnbQuantizationConfig(load_in_8bit=True), but is a {type(config).__name__}"
        )


def _warn_of_unknown_modules(model: nn.Module, field: str, entries: Collection[str]) -> None:
    """Warn of entries that name nothing in the model. Those that its class lists for all its models may."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = [name for name, _ in [*model.named_modules(remove_duplicate=False), *tensors]]
    listed = {
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    }
    unknown = [one for one in entries if one not in listed and not any(is_one_of(name, [one]) for name in names)]
    if unknown:
        ends = {".".join(parts[at:]) for name in names for parts in [name.split(".")] for at in range(len(parts))}
        warn_of_unknown(f"BnbQuantizationConfig.{field}", unknown, model, "module", sorted(ends))


def _quantize_in_place(
    model: nn.Module, config: BnbQuantizationConfig, skipped: Sequence[str], kept: Sequence[str]
) -> nn.Module:
    device = as_device(default_device().type)
    replace_with_bnb_layers(model, config, skipped)
    full = {parameter for name, parameter in model.named_parameters(remove_duplicate=False) if is_one_of(name, kept)}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtype = torch.float32 if parameter in full else config.torch_dtype or parameter.dtype
            parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _places(
    model: nn.Module,
    config: BnbQuantizationConfig,
    device_map: Mapping[str, Any] | str | None,
    whole: list[str] | None,
    max_memory: Mapping[int | str, Any] | None,
    skipped: Sequence[str],
    kept: Sequence[str],
) -> dict[str, Any]:
    """The device of each module.

    Raises:
        OffloadError: modules that would be quantised to 4 bits are offloaded.
    """
    if device_map is None:
        return {"": as_device(default_device().type)}
    tensors = [(name, one) for name, one in named_module_tensors(model, recurse=True) if not bits_of(one)]
    dtypes = {name: config.torch_dtype or one.dtype for name, one in tensors if one.is_floating_point()}
    dtypes |= {name: torch.float32 for name, _ in tensors if is_one_of(name, kept)}
    places = resolve_device_map(
        model,
        device_map,
        max_memory=max_memory,
        no_split_module_classes=whole,
        dtype=config.target_dtype,
        special_dtypes=dtypes,
    )
    wrong = [name for name in _offloaded(places) if not is_one_of(name, skipped)] if config.load_in_4bit else []
    if wrong:
        parts = shortened([name or "the whole model" for name in wrong], 5)
        raise OffloadError(
            f"the device map offloads {parts}, and layers in 4 bits are not offloaded. Give the model "
            "more memory, use 8 bits, or pass a device map of several modules: those that it offloads are not quantised"
        )
    return places


def _offloaded(device_map: Mapping[str, Any]) -> list[str]:
    """The modules that do not have their weights where they compute: see ``dispatch_model``."""
    accelerator = any(str(device) not in ("cpu", "disk") for device in device_map.values())
    resting = ("cpu", "disk") if accelerator else ("disk",)
    return [name for name, device in device_map.items() if str(device) in resting]


def _refuse_empty(model: nn.Module, places: Mapping[str, Any], source: Any) -> None:
    on_disk = [name for name, device in places.items() if device == "disk"]
    empty = [name for name, one in model.named_parameters() if one.is_meta and not _is_inside(name, on_disk)]
    if empty:
        raise CheckpointError(f"{source} has no weights for {shortened(empty, 5)}")


def _is_inside(name: str, parts: Collection[str]) -> bool:
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)
