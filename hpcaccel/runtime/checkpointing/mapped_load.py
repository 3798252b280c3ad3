"""Loading a checkpoint into a model that is distributed over devices, CPU memory and the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import holds_shards
from hpcaccel.runtime.checkpointing.load_model import load_whole
from hpcaccel.runtime.checkpointing.quantized_placement import QuantizedPlacement
from hpcaccel.runtime.checkpointing.weight_placement import WeightPlacement, stored_weights
from hpcaccel.runtime.compat.introspection import find_tied_parameters, retie_parameters
from hpcaccel.runtime.offload.device_map import resolve_device_map
from hpcaccel.runtime.offload.dispatch import dispatch_model
from hpcaccel.runtime.offload.mapped_tensors import OffloadError, as_dtype
from hpcaccel.runtime.offload.model_parts import check_module, check_tied_parameters_on_same_device
from hpcaccel.runtime.offload.quantized_tensors import bits_of
from hpcaccel.runtime.offload.tensor_placement import clear_cache_of
from hpcaccel.runtime.offload.weight_store import save_offload_index

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

log = logging.getLogger(__name__)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights from files written by ``save_model`` or Hugging Face libraries into a plain or prepared model, in
    place. One tensor, or one pickled file, is in memory at a time. All ranks must call this if the model is sharded.

    Args:
        checkpoint: a file, an ``.index.json``, or a directory with either. No code in pickled files is run.
        device_map: the device of each module; ``"disk"`` leaves parameters on the meta device, for ``dispatch_model``.
            None means that tensors stay where they are. Has no effect on a sharded model.
        offload_folder: gets the index of the tensors on disk. Those in safetensors files are not copied into it, so
            that the checkpoint must not be changed while the model is used; others are. If a process group with several
            ranks exists, each of them uses the folder ``rank_N`` inside it.
        dtype: dtype of floating-point weights, if there is a device map; default: the model's.
        offload_buffers: whether persistent buffers of modules on disk are offloaded, too. If not, they are loaded.
        keep_in_fp32_modules: names of modules that are float32 if ``dtype`` is float16. In a model with layers of
            bitsandbytes, they are float32 with any ``dtype``.
        strict: whether missing and unexpected names are an error.
        offload_8bit_bnb, offload_state_dict, full_state_dict, broadcast_from_rank0: without effect. Weights of
            bitsandbytes' 8-bit layers are always quantised before they are written.

    Raises:
        CheckpointError: there is no such file; a file cannot be read; shapes differ; names differ, and ``strict`` is
            true.
        OffloadError: a tensor has no device in the map; a part is on disk, and there is no ``offload_folder``.
        RuntimeMisuse: there is no device map, but a ``dtype``, a folder, or layers of bitsandbytes; ``model`` is not a
            module; for the reasons that ``load_sharded`` lists.
    """
    check_module(model, "load_checkpoint_in_model(model, checkpoint)")
    path = Path(checkpoint)
    quantized = any(bits_of(parameter) for parameter in model.parameters())
    if device_map is None or holds_shards(model):
        if offload_folder is not None or dtype is not None:
            raise RuntimeMisuse(
                "load_checkpoint_in_model(): offload_folder and dtype need a device_map, and a model that is not "
                'sharded. Pass device_map={"": "cpu"}, or call model.to(dtype) first'
            )
        if quantized:
            raise RuntimeMisuse(
                "load_checkpoint_in_model(): the model has layers of bitsandbytes, which quantise their weights on a "
                'device. Pass a device_map, such as {"": "cpu"} or {"": 0}'
            )
        _warn_of_unexpected(model, path, load_whole(model, path, strict=strict))
        return
    if "disk" in device_map.values() and offload_folder is None:
        raise OffloadError("the device map puts parts of the model on disk: pass a folder as offload_folder")
    kind = QuantizedPlacement if quantized else WeightPlacement
    loading = kind(model, device_map, offload_folder, as_dtype(dtype), tuple(keep_in_fp32_modules or ()))
    _load_by_map(loading, path, offload_buffers=offload_buffers, strict=strict)


def _load_by_map(loading: WeightPlacement, path: Path, *, offload_buffers: bool, strict: bool) -> None:
    model, ties = loading.model, find_tied_parameters(loading.model)
    check_tied_parameters_on_same_device(ties, loading.map)
    with torch.no_grad():
        unexpected = [
            one.name for one in stored_weights(path) if not loading.take(one, offload_buffers=offload_buffers)
        ]
        loading.finish()
    missing = loading.missing(ties)
    clear_cache_of(*loading.map.values())
    if strict and (missing or unexpected):
        from hpcaccel.runtime.checkpointing.sharded_load import mismatch

        raise mismatch(path, missing, unexpected)
    _warn_of_unexpected(model, path, unexpected)
    if missing:
        log.warning("%s has no weights for %s of %s", path, shortened(missing, 8), type(model).__name__)
    if loading.folder is not None:
        save_offload_index(loading.index, loading.folder)
    retie_parameters(model, ties)


def _warn_of_unexpected(model: nn.Module, path: Path, names: Sequence[str]) -> None:
    if names:
        log.warning(
            "weights in %s were not used when loading %s, which has no tensors of these names: %s",
            path,
            type(model).__name__,
            shortened(names, 8),
        )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | None = None,
    max_memory: Mapping[int | str, Any] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, usually one on the meta device, and distribute it over devices.

    Args:
        checkpoint: as in ``load_checkpoint_in_model``.
        device_map: the device of each module, or ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``
            to compute it. None loads the model without distributing it.
        max_memory, no_split_module_classes: as in ``infer_auto_device_map``, for a computed map; default of the latter:
            the model's ``_no_split_modules``.
        offload_folder, offload_buffers, dtype, offload_state_dict, strict, full_state_dict, broadcast_from_rank0: as in
            ``load_checkpoint_in_model``.
        skip_keys, preload_module_classes, force_hooks: as in ``dispatch_model``.

    Returns:
        The same model.

    Raises:
        CheckpointError, RuntimeMisuse: as in ``load_checkpoint_in_model`` and ``dispatch_model``.

    Example::

        with hpcaccel.init_empty_weights():
            model = Model()
        model = hpcaccel.load_checkpoint_and_dispatch(model, "weights/", device_map="auto")
    """
    check_module(model, "load_checkpoint_and_dispatch(model, checkpoint, device_map=...)")
    loading: dict[str, Any] = {"dtype": dtype, "offload_buffers": offload_buffers}
    choosing: dict[str, Any] = {"max_memory": max_memory, "no_split_module_classes": no_split_module_classes}
    places = None if device_map is None else resolve_device_map(model, device_map, **choosing, **loading)
    load_checkpoint_in_model(model, checkpoint, places, offload_folder, strict=strict, **loading)
    if places is None:
        return model
    return dispatch_model(
        model,
        places,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
