"""Weights that are not on a device: in CPU memory, in a folder of raw files, or inside safetensors files.

A folder of offloaded weights has one file ``NAME.dat`` with the bytes of each tensor, and ``index.json`` with dtypes
and shapes. An entry of the index may also refer to a tensor inside a safetensors file, which is then not copied.
Accelerate reads and writes the same format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.checkpoint_files.weight_files import Head, read_head
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.offload.mapped_tensors import MappedTensor, OffloadError, as_dtype, read_tensor

__all__ = [
    "INDEX",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "rank_folder",
    "read_index",
    "save_offload_index",
    "written_folder",
]

INDEX = "index.json"


def rank_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder for this rank's offloaded weights. If a process group with several ranks exists, it is ``rank_N`` in
    ``folder``: the ranks write at the same time, and may have different weights."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Path(folder)
    return Path(folder, f"rank_{dist.get_rank()}")


def written_folder(folder: str | os.PathLike[str]) -> Path:
    """``rank_folder``, unless only ``folder`` itself has an index: several ranks never write one there, so that it is
    complete and meant for all of them."""
    own, shared = rank_folder(folder), Path(folder)
    return shared if Path(shared, INDEX).is_file() and not Path(own, INDEX).is_file() else own


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write a tensor to ``offload_folder``.

    Args:
        index: gets an entry for the tensor, for ``save_offload_index``.

    Returns:
        ``index``.

    Raises:
        OffloadError: the name contains a path separator; the tensor is on the meta device.
    """
    path = _file(offload_folder, weight_name)
    if weight.is_meta:
        raise OffloadError(f"{weight_name} is on the meta device and has no values to write to {path.parent}")
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    path.unlink(missing_ok=True)  # a tensor that is mapped, or tied under another name, keeps the old file
    with path.open("wb", buffering=0) as file:
        room = memoryview(raw.numpy())  # type: ignore[arg-type]
        while room:
            room = room[file.write(room) :]
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def _file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    if folder is None:
        raise OffloadError(f"{name} is not in a safetensors file, and there is no folder for it: pass save_folder")
    if os.sep in name:
        raise OffloadError(f"the name of the tensor {name!r} contains {os.sep!r} and cannot be a file name")
    return Path(folder, f"{name}.dat")


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a file that ``offload_weight`` has written; see ``read_tensor``.

    Args:
        weight_info: the tensor's entry in the index.
    """
    return read_tensor(_raw(Path(weight_file), weight_info))


def _raw(path: Path, entry: Mapping[str, Any]) -> MappedTensor:
    dtype = as_dtype(str(entry["dtype"]))
    assert dtype is not None
    return MappedTensor(path, 0, dtype, tuple(int(length) for length in entry["shape"]))


def read_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a folder's index, by the tensors' names.

    Raises:
        CheckpointError: the index does not exist, or is damaged.
    """
    path = Path(folder, INDEX)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the index of offloaded weights {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} is not an index of offloaded weights. Pass a folder that offload_state_dict() has written"
        )
    return found


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the index of a folder. Does nothing without entries."""
    if not index:
        return
    known = read_index(offload_folder) if Path(offload_folder, INDEX).is_file() else {}
    atomic_write(Path(offload_folder, INDEX), json.dumps({**known, **index}, indent=2) + "\n", sync=False)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write tensors and their index to the folder ``save_dir``. A tensor with several names is written once: the other
    names are hard links where the file system has them.

    Raises:
        OffloadError: a tensor is on the meta device, or its name contains a path separator.
    """
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    written: dict[Any, str] = {}
    for name, tensor in state_dict.items():
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        twin = written.setdefault(same, name) if tensor.numel() and not tensor.is_meta else name
        if twin == name or not _linked(_file(save_dir, twin), _file(save_dir, name)):
            offload_weight(tensor, name, save_dir, index)
        else:
            index[name] = index[twin]
    save_offload_index(index, save_dir)


def _linked(path: Path, other: Path) -> bool:
    try:
        other.unlink(missing_ok=True)
        os.link(path, other)
    except OSError:  # no hard links: the tensor is written again
        return False
    return True


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The entries of ``state_dict`` that are, or belong to, one of the submodules."""
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if name == "" or key == name or key.startswith(f"{name}.")
    }


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The entries of ``dataset`` whose names begin with ``prefix``, looked up without it. Iterating gives whole names,
    as in Accelerate."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name, from a state dict in memory or, if they are not in it, from files, read at each access.

    Args:
        state_dict: tensors in memory.
        save_folder: a folder written by ``offload_state_dict``.
        index: entries as in the folder's index; default: the folder's index.
        device: where tensors from safetensors files are placed; default: the CPU.

    Raises:
        OffloadError: all arguments are None.
        CheckpointError: the folder has no index, or a damaged one.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise OffloadError("OffloadedWeightsLoader() needs a state_dict, a save_folder or an index")
        self.state_dict: dict[str, torch.Tensor] = dict(state_dict or {})
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_index(save_folder)
        self.index: dict[str, Any] = dict(index or {})
        self.device = device
        self._heads: dict[Path, tuple[tuple[int, ...], Head]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        tensor = read_tensor(self.stored(key))
        if "safetensors_file" not in entry:
            return tensor
        tensor = tensor.to(as_dtype(entry.get("dtype")) or tensor.dtype)
        return tensor if self.device is None else tensor.to(self.device)

    @property
    def all_keys(self) -> list[str]:
        """The names of all tensors."""
        return list(dict.fromkeys([*self.state_dict, *self.index]))

    def stored(self, key: str) -> MappedTensor:
        """Location of the bytes of a tensor that is not in memory.

        Raises:
            CheckpointError: the safetensors file is damaged, or does not contain the tensor.
        """
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            return _raw(_file(self.save_folder, str(entry.get("weight_name", key))), entry)
        path, name = Path(entry["safetensors_file"]), str(entry.get("weight_name", key))
        head = self._head(path)
        found = head.tensors.get(name)
        if found is None:
            has = shortened(sorted(head.tensors), 5)
            raise CheckpointError(f"{path} does not contain the tensor {name} (it contains {has})")
        dtype = as_dtype(found.dtype)
        assert dtype is not None
        return MappedTensor(path, found.offset, dtype, found.shape)

    def _head(self, path: Path) -> Head:
        """The header of a file, read again if another file has taken its place."""
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read weights from {path}: {error.strerror or error}") from error
        version = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
        known, head = self._heads.get(path, ((), None))
        if head is None or known != version:
            head = read_head(path)
            self._heads[path] = (version, head)
        return head

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)
