"""Saved state dicts from which each rank fills its own tensors, shard by shard, whatever their layout on disk.

A key path (``way``) is the tuple of keys that leads to a value in the nested state dict. The keys of a list are its
indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hpcaccel.checkpoint.formats.foreign import read_chunk, read_value
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.dcp_reader import Dcp
from hpcaccel.errors import CheckpointError, Damaged
from hpcaccel.runtime.checkpointing.load_model import copy_part
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["DcpState", "MainState", "RankFileState", "StoredState", "Way", "flat", "nested", "put_together"]

Way = tuple[str, ...]


class StoredState(Protocol):
    """A saved state dict. All ranks make the same calls of ``fill`` in the same order."""

    where: Path
    tensors: dict[Way, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each whole tensor."""

    def values(self) -> dict[Way, Any]:
        """The values that are not tensors."""
        raise NotImplementedError

    def fill(self, way: Way, target: torch.Tensor) -> None:
        """Read a tensor into ``target``, which has the same shape; if this is a DTensor, only this rank's shard of
        it."""
        raise NotImplementedError


class DcpState:
    """A directory of ``torch.distributed.checkpoint`` that contains one state dict under one key. Each rank reads the
    chunks that its shards need. No code in the files is run.

    Raises:
        CheckpointError: the directory contains no such checkpoint.
        Damaged: the checkpoint is damaged.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self._found = Dcp.read(where)
        # Without the outermost key, which is "model" or "optimizer".
        self._keys = {
            self._found.nested.get(key, (key,))[1:] or (key,): key
            for key in (*self._found.tensors, *self._found.values)
        }
        self.tensors = {
            way: (stored.shape, dtype_of(stored.dtype))
            for way, key in self._keys.items()
            if (stored := self._found.tensors.get(key)) is not None
        }

    def values(self) -> dict[Way, Any]:
        return {way: read_value(self._found, key) for way, key in self._keys.items() if way not in self.tensors}

    @torch.no_grad()
    def fill(self, way: Way, target: torch.Tensor) -> None:
        key = self._keys[way]
        chunks = self._found.tensors[key].chunks
        for begin, local in _own_parts(target):
            left = local.numel()
            for at, shape in chunks:
                overlap = _overlap(begin, tuple(local.shape), at, shape)
                if overlap is None:
                    continue
                here, there = overlap
                part = local[here]
                part.copy_(read_chunk(self._found, key, at)[there])
                left -= part.numel()
            if left:
                raise Damaged(f"{self.where}: the chunks of {key} do not cover the tensor")


class MainState:
    """A state dict that rank 0 has read; it sends one tensor after the other to the other ranks.

    Args:
        content: the nested state dict with whole tensors; None on all ranks but rank 0.
    """

    def __init__(self, where: Path, content: Mapping[str, Any] | None, group: RankGroup) -> None:
        self.where = where
        self._group = group
        self._flat = flat(content) if content is not None else {}
        shapes = _shapes(self._flat)
        others = {way: value for way, value in self._flat.items() if way not in shapes}
        self.tensors, self._values = group.from_main((shapes, others), what="load")

    def values(self) -> dict[Way, Any]:
        return dict(self._values)

    @torch.no_grad()
    def fill(self, way: Way, target: torch.Tensor) -> None:
        if self._group.world_size == 1:
            copy_part(target, self._flat[way])
            return
        shape, dtype = self.tensors[way]
        device = self._group.device
        whole = self._flat[way].to(device).contiguous() if self._group.is_main else None
        whole = torch.empty(shape, dtype=dtype, device=device) if whole is None else whole
        dist.broadcast(whole, src=0)
        copy_part(target, whole)


class RankFileState:
    """A state dict with this rank's own shards, read from a file of its own.

    Args:
        content: the nested state dict; tensors that were sharded are DTensors.
    """

    def __init__(self, where: Path, content: Mapping[str, Any]) -> None:
        self.where = where
        self._flat = flat(content)
        self.tensors = _shapes(self._flat)

    def values(self) -> dict[Way, Any]:
        return {way: value for way, value in self._flat.items() if way not in self.tensors}

    @torch.no_grad()
    def fill(self, way: Way, target: torch.Tensor) -> None:
        saved, here = _local(self._flat[way]), _local(target)
        if saved.shape != here.shape:
            raise CheckpointError(
                f"{self.where}: the shard of {'.'.join(way)} has shape {tuple(saved.shape)}, but {tuple(here.shape)} "
                "on this rank. Files with one rank's shards are for the same number and layout of ranks"
            )
        here.copy_(saved)


def _shapes(values: Mapping[Way, Any]) -> dict[Way, tuple[tuple[int, ...], torch.dtype]]:
    return {way: (tuple(one.shape), one.dtype) for way, one in values.items() if isinstance(one, torch.Tensor)}


def flat(content: Mapping[Any, Any]) -> dict[Way, Any]:
    """The values in nested dicts, and in lists of dicts or tensors, by key path."""
    return dict(_walk((), content))


def _walk(way: Way, value: Any) -> Iterator[tuple[Way, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk((*way, str(key)), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | torch.Tensor) for item in value):
        for number, item in enumerate(value):
            yield from _walk((*way, str(number)), item)
    else:
        yield way, value


def nested(stored: StoredState) -> dict[str, Any]:
    """The whole state dict, with all tensors in CPU memory."""
    found = stored.values()
    for way, (shape, dtype) in stored.tensors.items():
        found[way] = torch.empty(shape, dtype=dtype)
        stored.fill(way, found[way])
    return put_together(found)


def put_together(values: Mapping[Way, Any]) -> dict[str, Any]:
    """The nested dict of values by key path. Inner dicts whose keys are 0, 1, … become lists."""
    found: dict[str, Any] = {}
    for (*parents, last), value in values.items():
        inner = found
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return {key: _with_lists(value) for key, value in found.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    numbers = [str(number) for number in range(len(inner))]
    return [inner[number] for number in numbers] if inner and set(inner) == set(numbers) else inner


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.to_local() if is_dtensor(found) else found  # type: ignore[attr-defined]


def _own_parts(target: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's parts of a tensor: pairs of the part's offset in the whole tensor, and its local tensor."""
    if not is_dtensor(target):
        return [((0,) * target.dim(), target.detach())]
    sharded: Any = target.detach()
    return [(tuple(chunk.offsets), sharded.to_local()) for chunk in sharded.__create_chunk_list__() if all(chunk.sizes)]


def _overlap(
    begin: tuple[int, ...], shape: tuple[int, ...], at: tuple[int, ...], size: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of one tensor overlap: the slices inside each of them; None if they do not."""
    here, there = [], []
    for mine, length, its, extent in zip(begin, shape, at, size, strict=True):
        first, last = max(mine, its), min(mine + length, its + extent)
        if first >= last:
            return None
        here.append(slice(first - mine, last - mine))
        there.append(slice(first - its, last - its))
    return tuple(here), tuple(there)
