"""Deduplication of a save's plan without rank 0: of the ranks that hold the same chunk, one writes it.

``torch.distributed.checkpoint`` sends the plans of all ranks to rank 0 for this, which takes time and memory in
proportion to the chunks of all ranks. Here each rank decides by itself which of its chunks it writes: from the mesh and
the placements of a DTensor follows which ranks have the same chunk, and all of these take the same decision.

``Coverage`` then shows whether the ranks together write each tensor once. It has an entry per tensor, and those of all
ranks are added up along a tree. If the meshes of a tensor differ between ranks (one mesh per replica of a model), a
rank does not know of the other replicas, and more than the whole tensor would be written.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint.dcp_storage import item_bytes
from hpcaccel.checkpoint.save_content import SaveContent
from hpcaccel.checkpoint_files.contents import OWN_KEYS

__all__ = ["Coverage", "other_writers", "own_items"]


class _Replica(NamedTuple):
    """Which replica of a chunk this rank has. Tensors of a ``group`` have replicas on the same ranks."""

    group: Hashable
    number: int
    replicas: int


_ONLY = _Replica(None, 0, 1)


def own_items(items: Sequence[WriteItem], content: SaveContent, *, rank: int, ranks: int) -> list[WriteItem]:
    """Those of a rank's ``items`` that it writes. The replicas of a group get about as many bytes each."""
    numbers = _writers(items, content, rank=rank, ranks=ranks)
    return [item for item in items if numbers[item.index][0] == numbers[item.index][1].number]


def other_writers(
    items: Sequence[WriteItem], content: SaveContent, keys: Container[str], *, rank: int, ranks: int
) -> list[int]:
    """The other ranks that write a rank's ``items`` of the DTensors ``keys``, ascending."""
    found = set()
    for item, (number, replica) in zip(items, _writers(items, content, rank=rank, ranks=ranks).values(), strict=True):
        tensor = content.tensors[item.index.fqn]
        if item.index.fqn in keys and number != replica.number and isinstance(tensor, DTensor):
            found.add(_rank_of(tensor, number))
    return sorted(found)


def _writers(
    items: Sequence[WriteItem], content: SaveContent, *, rank: int, ranks: int
) -> dict[MetadataIndex, tuple[int, _Replica]]:
    """For each of a rank's items, in their order, the number of the replica that writes it, and the rank's replica."""
    loads: dict[Hashable, list[tuple[int, int]]] = {}
    found = {item.index: (0, _ONLY) for item in items}
    for item in sorted(items, key=lambda item: (-item_bytes(item), item.index.fqn)):
        key = item.index.fqn
        replica = _replica(content.tensors[key])
        if key in content.replicated:
            replica = _Replica("all ranks", rank, ranks)
        if replica.replicas > 1:
            heap = loads.setdefault(replica.group, [(0, number) for number in range(replica.replicas)])
            load, number = heap[0]
            heapq.heapreplace(heap, (load + item_bytes(item), number))
            found[item.index] = number, replica
    return found


def _rank_of(tensor: DTensor, number: int) -> int:
    """The rank that has replica ``number`` of this rank's chunk."""
    mesh = tensor.device_mesh
    place = list(mesh.get_coordinate() or ())
    for dimension in reversed(_replicated_dimensions(tensor)):
        number, place[dimension] = divmod(number, mesh.size(dimension))
    return int(mesh.mesh[tuple(place)])


def _replicated_dimensions(tensor: DTensor) -> list[int]:
    return [number for number, placement in enumerate(tensor.placements) if placement.is_replicate()]


def _replica(tensor: torch.Tensor) -> _Replica:
    if not isinstance(tensor, DTensor):
        return _ONLY
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None  # otherwise the planner makes no item
    dimensions = _replicated_dimensions(tensor)
    number, count = 0, 1
    for dimension in dimensions:
        number = number * mesh.size(dimension) + place[dimension]
        count *= mesh.size(dimension)
    return _Replica((_mesh_digest(mesh), *dimensions), number, count)


@lru_cache(maxsize=64)
def _mesh_digest(mesh: DeviceMesh) -> str:
    ranks = mesh.mesh
    return hashlib.blake2b(repr((tuple(ranks.shape), ranks.flatten().tolist())).encode(), digest_size=8).hexdigest()


class _Part(NamedTuple):
    """What some ranks write of a tensor.

    Args:
        layout: mesh and placements; None if the ranks differ in anything but what follows.
        wanted: number of ranks that have to have the tensor. Only ranks with the same tensors take the same decisions.
        holders: number of these ranks that have it.
        elements: that they write together, in so many ``chunks``.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    layout: str | None
    wanted: int
    holders: int
    elements: int
    chunks: int


@dataclass
class Coverage:
    """What some ranks write together.

    Args:
        files: number of ranks that write anything.
        parts: by key. A rank's own tensors are left out: nobody else has a part in them.
    """

    files: int
    parts: dict[str, _Part]

    @classmethod
    def of(cls, items: Sequence[WriteItem], own: Sequence[WriteItem], content: SaveContent, *, ranks: int) -> Coverage:
        """What one rank writes.

        Args:
            items: what it has.
            own: see ``own_items``.
        """
        held = {item.index.fqn for item in items}
        parts = {
            key: _part(tensor, held=key in held, everywhere=ranks if key in content.replicated else 1)
            for key, tensor in content.tensors.items()
            if not key.startswith(OWN_KEYS)
        }
        for item in own:
            key, data = item.index.fqn, item.tensor_data
            if key in parts and data is not None:
                parts[key] = parts[key]._replace(elements=math.prod(data.chunk.sizes), chunks=1)
        return cls(int(bool(own)), parts)

    def joined(self, other: Coverage) -> Coverage:
        """What both write. Takes over ``self``."""
        self.files += other.files
        for key, part in other.parts.items():
            known = self.parts.get(key)
            if known is None:
                self.parts[key] = part
                continue
            self.parts[key] = known._replace(
                layout=known.layout if known[:4] == part[:4] else None,
                holders=known.holders + part.holders,
                elements=known.elements + part.elements,
                chunks=known.chunks + part.chunks,
            )
        return self

    @property
    def is_complete(self) -> bool:
        """Whether every tensor is written once. Ranks of one mesh have different chunks, or replicas of one."""
        return all(
            part.layout is not None and part.holders == part.wanted and part.elements == math.prod(part.size)
            for part in self.parts.values()
        )

    def wide(self, ranks: int) -> frozenset[str]:
        """The tensors that have more than ``ranks`` chunks."""
        return frozenset(key for key, part in self.parts.items() if part.chunks > ranks)


def _part(tensor: torch.Tensor, *, held: bool, everywhere: int) -> _Part:
    """What one rank has of a tensor, and writes nothing of."""
    layout, wanted = "", everywhere
    if isinstance(tensor, DTensor):
        layout, wanted = f"{_mesh_digest(tensor.device_mesh)} {tensor.placements}", tensor.device_mesh.size()
    return _Part(tensor.dtype, tuple(tensor.shape), layout, wanted, int(held), 0, 0)
