"""Tensors of a checkpoint, and their placement by a device map."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import read_head
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.load_model import load_state_dict, pickled
from hpcaccel.runtime.checkpointing.sharded_load import weight_files
from hpcaccel.runtime.offload.mapped_tensors import MappedTensor, as_dtype, read_tensor
from hpcaccel.runtime.offload.model_parts import device_of
from hpcaccel.runtime.offload.tensor_placement import set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import OffloadedWeightsLoader, offload_weight, rank_folder

__all__ = ["StoredWeight", "WeightPlacement", "check_shape", "stored_weights"]


class StoredWeight(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    read: Callable[[], torch.Tensor]
    """Returns the tensor, in memory of its own."""
    place: tuple[Path, str] | None
    """The safetensors file that contains it, and its name there; None if it is in another file."""


def stored_weights(path: Path) -> Iterator[StoredWeight]:
    """The tensors of a checkpoint, in the order of its files."""
    if files := list(pickled(path)):
        for file in files:
            for name, value in load_state_dict(file).items():
                yield StoredWeight(name, lambda value=value: value, None)  # type: ignore[misc]
        return
    found = weight_files(path)
    for file in dict.fromkeys(found.values()):
        for name, tensor in read_head(file).tensors.items():
            if found.get(name) == file:
                dtype = as_dtype(tensor.dtype)
                assert dtype is not None
                stored = MappedTensor(file, tensor.offset, dtype, tensor.shape)
                yield StoredWeight(name, lambda stored=stored: read_tensor(stored, copy=True), (file, name))  # type: ignore[misc]


def check_shape(name: str, found: torch.Size, wanted: torch.Size) -> None:
    """Raise CheckpointError if a tensor of a checkpoint does not have the model's shape."""
    if found != wanted:
        raise CheckpointError(f"{name} has shape {tuple(found)} in the checkpoint, but {tuple(wanted)} in the model")


class WeightPlacement:
    """Places the tensors of a checkpoint by a device map."""

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

    def take(self, weight: StoredWeight, *, offload_buffers: bool) -> bool:
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
        check_shape(weight.name, value.shape, present.shape)
        where = "cpu" if device == "disk" else device
        dtype = self._dtype(weight.name)
        set_module_tensor_to_device(self.model, weight.name, where, value=value, dtype=dtype, clear_cache=False)
        return True

    def finish(self) -> None:
        """Called after the last tensor of the checkpoint."""

    def _dtype(self, name: str) -> torch.dtype | None:
        return torch.float32 if self.dtype is torch.float16 and self._is_kept(name) else self.dtype

    def _is_kept(self, name: str) -> bool:
        """Whether ``keep_in_fp32`` names the tensor, or a module around it."""
        return any(name == one or f"{one}." in name for one in self.keep_in_fp32)

    def _leave_on_disk(self, weight: StoredWeight, present: torch.Tensor) -> None:
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
        Ties that loading has broken are restored."""
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
            set_module_tensor_to_device(
                self.model, name, device_of(name, self.map), value=value, dtype=value.dtype, clear_cache=False
            )
