"""Loading a checkpoint into a model that is distributed over devices, CPU memory and the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import read_head
from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import holds_shards
from hpcaccel.runtime.checkpointing.load_model import load_state_dict, load_whole, pickled
from hpcaccel.runtime.compat.introspection import find_tied_parameters, retie_parameters
from hpcaccel.runtime.offload.device_map import resolve_device_map
from hpcaccel.runtime.offload.dispatch import dispatch_model
from hpcaccel.runtime.offload.mapped_tensors import MappedTensor, OffloadError, as_dtype, read_tensor
from hpcaccel.runtime.offload.model_parts import check_tied_parameters_on_same_device, device_of
from hpcaccel.runtime.offload.tensor_placement import set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import (
    OffloadedWeightsLoader,
    offload_weight,
    rank_folder,
    save_offload_index,
)

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

log = logging.getLogger(__name__)


class _Weight(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    read: Callable[[], torch.Tensor]
    """Returns the tensor, in memory of its own."""
    place: tuple[Path, str] | None
    """The safetensors file that contains it, and its name there; None if it is in another file."""


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
        keep_in_fp32_modules: names of modules that are float32 if ``dtype`` is float16.
        strict: whether missing and unexpected names are an error.
        offload_8bit_bnb: must be False; bitsandbytes is not supported.
        offload_state_dict, full_state_dict, broadcast_from_rank0: accepted for Accelerate's scripts, without effect.

    Raises:
        CheckpointError: there is no such file; a file cannot be read; shapes differ; names differ, and ``strict`` is
            true.
        OffloadError: a tensor has no device in the map; a part is on disk, and there is no ``offload_folder``.
        RuntimeMisuse: a ``dtype`` or a folder is given without a device map; for the reasons that ``load_sharded``
            lists.
    """
    path = Path(checkpoint)
    if offload_8bit_bnb:
        raise RuntimeMisuse("offload_8bit_bnb=True is for weights of bitsandbytes, which hpcaccel does not support")
    if device_map is None or holds_shards(model):
        if offload_folder is not None or dtype is not None:
            raise RuntimeMisuse(
                "load_checkpoint_in_model(): offload_folder and dtype need a device_map, and a model that is not "
                'sharded. Pass device_map={"": "cpu"}, or call model.to(dtype) first'
            )
        _warn_of_unexpected(model, path, load_whole(model, path, strict=strict))
        return
    if "disk" in device_map.values() and offload_folder is None:
        raise OffloadError("the device map puts parts of the model on disk: pass a folder as offload_folder")
    loading = _Loading(model, device_map, offload_folder, as_dtype(dtype), tuple(keep_in_fp32_modules or ()))
    _load_by_map(loading, path, offload_buffers=offload_buffers, strict=strict)


def _load_by_map(loading: _Loading, path: Path, *, offload_buffers: bool, strict: bool) -> None:
    model, ties = loading.model, find_tied_parameters(loading.model)
    check_tied_parameters_on_same_device(ties, loading.map)
    with torch.no_grad():
        unexpected = [one.name for one in _weights(path) if not loading.take(one, offload_buffers=offload_buffers)]
    missing = loading.missing(ties)
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


def _weights(path: Path) -> Iterator[_Weight]:
    """The tensors of a checkpoint, in the order of its files."""
    if files := list(pickled(path)):
        for file in files:
            for name, value in load_state_dict(file).items():
                yield _Weight(name, lambda value=value: value, None)  # type: ignore[misc]
        return
    from hpcaccel.runtime.checkpointing.sharded_load import weight_files

    found = weight_files(path)
    for file in dict.fromkeys(found.values()):
        for name, tensor in read_head(file).tensors.items():
            if found.get(name) == file:
                dtype = as_dtype(tensor.dtype)
                assert dtype is not None
                stored = MappedTensor(file, tensor.offset, dtype, tensor.shape)
                yield _Weight(name, lambda stored=stored: read_tensor(stored, copy=True), (file, name))  # type: ignore[misc]


class _Loading:
    """Puts the tensors of a checkpoint where a device map wants them."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Any],
        folder: str | os.PathLike[str] | None,
        dtype: torch.dtype | None,
        keep_in_fp32: Collection[str],
    ) -> None:
        self.model = model
        self.map = device_map
        self.folder = None if folder is None else rank_folder(folder)
        self.dtype = dtype
        self.keep_in_fp32 = keep_in_fp32
        self.tensors = {
            key: one for key, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)
        }
        self.loaded: set[str] = set()
        self.index: dict[str, Any] = {}
        if self.folder is not None:
            os.makedirs(self.folder, exist_ok=True)

    def take(self, weight: _Weight, *, offload_buffers: bool) -> bool:
        """Place a tensor. Returns whether the model has one of this name."""
        present = self.tensors.get(weight.name)
        if present is None:
            return False
        self.loaded.add(weight.name)
        device = device_of(weight.name, self.map)
        if device == "disk" and (offload_buffers or isinstance(present, nn.Parameter)):
            self._leave_on_disk(weight, present)
            return True
        value = weight.read()
        if value.shape != present.shape:
            wrong, right = tuple(value.shape), tuple(present.shape)
            raise CheckpointError(f"{weight.name} has shape {wrong} in the checkpoint, but {right} in the model")
        where = "cpu" if device == "disk" else device
        set_module_tensor_to_device(self.model, weight.name, where, value=value, dtype=self._dtype(weight.name))
        return True

    def _dtype(self, name: str) -> torch.dtype | None:
        kept = any(name == one or f"{one}." in name for one in self.keep_in_fp32)
        return torch.float32 if kept and self.dtype is torch.float16 else self.dtype

    def _leave_on_disk(self, weight: _Weight, present: torch.Tensor) -> None:
        assert self.folder is not None
        if not present.is_meta or (self.dtype is not None and present.is_floating_point()):
            set_module_tensor_to_device(self.model, weight.name, "meta", dtype=self._dtype(weight.name))
        if weight.place is None:
            offload_weight(weight.read(), weight.name, self.folder, self.index)
        else:
            file, name = weight.place
            self.index[weight.name] = {"safetensors_file": str(file.resolve()), "weight_name": name}

    def missing(self, ties: Sequence[Sequence[str]]) -> list[str]:
        """Names of the model's tensors that the checkpoint does not have, not even under a name that they are tied to.
        Ties that the loading has broken are made again."""
        for group in ties:
            known = next((name for name in group if name in self.loaded), None)
            if known is None:
                continue
            self.loaded.update(group)
            for name in group:
                self._tie(name, known)
        return [name for name in self.tensors if name not in self.loaded]

    def _tie(self, name: str, known: str) -> None:
        """Give a tensor that the checkpoint may not have the values of the one that it is tied to."""
        on_disk = device_of(name, self.map) == "disk"
        if known not in self.index:
            if on_disk:
                assert self.folder is not None
                offload_weight(self.model.get_parameter(known), name, self.folder, self.index)
        elif on_disk:
            self.index.setdefault(name, {"weight_name": known, **self.index[known]})
            owner, _, key = name.rpartition(".")
            self.model.get_submodule(owner)._parameters[key] = self.model.get_parameter(known)
        elif self.model.get_parameter(name).is_meta:
            value = OffloadedWeightsLoader(save_folder=self.folder, index=self.index)[known].clone()
            set_module_tensor_to_device(self.model, name, device_of(name, self.map), value=value, dtype=value.dtype)


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
    """
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
