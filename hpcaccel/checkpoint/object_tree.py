"""Gather and scatter of Python objects along a binomial tree of ranks, on a gloo group.

torch's ``gather_object`` first passes the sizes through all ranks one after the other, pads every object to the size of
the largest one, and lets rank 0 receive from each rank. Here rank 0 receives ``log2(ranks)`` messages, each of which
contains the objects of a subtree without padding. Rank r's parent is r without its lowest set bit; rank r's children
are r + 1, r + 2, r + 4 … below its lowest set bit.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["gather", "scatter"]

T = TypeVar("T")

_TAG = 0x4B50
"""Tag of these messages: no other message between two ranks of a control group has it."""


def gather(values: dict[int, T], group: dist.ProcessGroup | None) -> dict[int, T] | None:
    """Collect the ``values`` of all ranks of ``group``. Collective.

    Args:
        values: this rank's values by rank; empty if it has none to contribute.

    Returns:
        On the group's rank 0 the values of all ranks, on the other ranks None.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    collected = dict(values)
    for child in _children(rank, ranks):
        collected |= _receive(child, group)
    if rank == 0:
        return collected
    _send(collected, _parent(rank), group)
    return None


def scatter(parts: dict[int, T] | None, group: dist.ProcessGroup | None) -> T:
    """Send each rank of ``group`` its part. Collective.

    Args:
        parts: on the group's rank 0, the part of each rank; on the other ranks None.

    Returns:
        This rank's part.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    held: dict[int, T] = _receive(_parent(rank), group) if parts is None else parts
    for child in reversed(_children(rank, ranks)):
        below = range(child, child + (child & -child))
        _send({number: held[number] for number in below if number in held}, child, group)
    return held[rank]


def _parent(rank: int) -> int:
    return rank & rank - 1


def _children(rank: int, ranks: int) -> list[int]:
    """The children of ``rank`` among ``ranks`` ranks, nearest first."""
    found, distance = [], 1
    while rank + distance < ranks and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found


def _send(value: Any, to: int, group: dist.ProcessGroup | None) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    peer = _global_rank(to, group)
    dist.send(torch.tensor([data.numel()], dtype=torch.int64), dst=peer, group=group, tag=_TAG)
    dist.send(data, dst=peer, group=group, tag=_TAG)


def _receive(sender: int, group: dist.ProcessGroup | None) -> Any:
    peer = _global_rank(sender, group)
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=peer, group=group, tag=_TAG)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, src=peer, group=group, tag=_TAG)
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 (pickled by another rank of this training)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
