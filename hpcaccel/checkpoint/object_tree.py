"""Gather, fold and scatter of Python objects along a binomial tree of ranks, on a gloo group.

torch's ``gather_object`` first passes the sizes through all ranks one after the other, pads every object to the size of
the largest one, and lets rank 0 receive from each rank. Here rank 0 receives ``log2(ranks)`` messages, each of which
contains the objects of a subtree without padding. Equal objects of neighbouring ranks travel once, so that the messages
of ranks that all agree do not grow with their number. Rank r's parent is r without its lowest set bit; rank r's
children are r + 1, r + 2, r + 4 … below its lowest set bit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["fold", "gather", "scatter"]

T = TypeVar("T")

_TAG = 0x4B50
"""Tag of these messages: no other message between two ranks of a control group has it."""

_Runs = list[tuple[int, int, bytes]]
"""Equal objects of neighbouring ranks: the first rank, the number of ranks, the pickled object."""


def gather(values: dict[int, T], group: dist.ProcessGroup | None) -> dict[int, T] | None:
    """Collect the ``values`` of all ranks of ``group``. Collective.

    Args:
        values: this rank's value by its rank; empty if it has none to contribute.

    Returns:
        On the group's rank 0 the values of all ranks, on the other ranks None.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    runs: _Runs = [(number, 1, pickle.dumps(value)) for number, value in values.items()]
    for child in _children(rank, ranks):
        runs = _joined(runs, _receive(child, group))
    if rank == 0:
        return {
            first + offset: pickle.loads(data)  # noqa: S301 (pickled by another rank of this training)
            for first, count, data in runs
            for offset in range(count)
        }
    _send(runs, _parent(rank), group)
    return None


def fold(value: T, combine: Callable[[T, T], T], group: dist.ProcessGroup | None) -> T | None:
    """Combine the values of all ranks of ``group``, in the order of the ranks, two at a time on their way. Collective.

    Args:
        combine: must not raise.

    Returns:
        On the group's rank 0 the combined value, on the other ranks None.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for child in _children(rank, ranks):
        value = combine(value, _receive(child, group))
    if rank == 0:
        return value
    _send(value, _parent(rank), group)
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


def _joined(runs: _Runs, more: _Runs) -> _Runs:
    """``runs`` and those of the ranks after them."""
    if runs and more:
        (first, count, data), (next_first, next_count, next_data) = runs[-1], more[0]
        if first + count == next_first and data == next_data:
            return [*runs[:-1], (first, count + next_count, data), *more[1:]]
    return [*runs, *more]


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
