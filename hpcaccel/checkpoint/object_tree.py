"""Broadcast of Python objects, and gather, fold and scatter along a binomial tree of ranks, on a gloo group.

torch's ``gather_object`` first passes the sizes through all ranks one after the other, pads every object to the size of
the largest one, and lets rank 0 receive from each rank. Here rank 0 receives ``log2(ranks)`` messages, each of which
contains the objects of a subtree without padding. Equal objects of neighbouring ranks travel once, so that the messages
of ranks that all agree do not grow with their number. Rank r's parent is r without its lowest set bit; rank r's
children are r + 1, r + 2, r + 4 … below its lowest set bit.

A small object is one message, with its size, where torch's functions for objects send the size first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

__all__ = ["broadcast", "fold", "gather", "scatter"]

T = TypeVar("T")

_TAG = 0x4B50
"""Tag of these messages: no other message between two ranks of a control group has it."""

_SIZE_BYTES, _FIRST_BYTES = 8, 1024
"""Bytes of an object's size, and of the first message, which begins with the size. The rest is a second message."""

_Runs = list[tuple[int, int, bytes]]
"""Equal objects of neighbouring ranks: the first rank, the number of ranks, the pickled object."""


def broadcast(value: T | None, group: dist.ProcessGroup | None) -> T:
    """The object of the group's rank 0 on all ranks; the other ranks' objects are ignored. Collective."""
    rank, source = dist.get_rank(group), _global_rank(0, group)
    first, rest = _packed(value) if rank == 0 else (_empty(_FIRST_BYTES), _empty(0))
    dist.broadcast(first, src=source, group=group)
    if rank != 0:
        rest = _empty(_left(first))
    if rest.numel():
        dist.broadcast(rest, src=source, group=group)
    return cast(T, value if rank == 0 else _unpacked(first, rest))


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
    peer = _global_rank(to, group)
    for message in _packed(value):
        if message.numel():
            dist.send(message, dst=peer, group=group, tag=_TAG)


def _receive(sender: int, group: dist.ProcessGroup | None) -> Any:
    peer = _global_rank(sender, group)
    first = _empty(_FIRST_BYTES)
    dist.recv(first, src=peer, group=group, tag=_TAG)
    rest = _empty(_left(first))
    if rest.numel():
        dist.recv(rest, src=peer, group=group, tag=_TAG)
    return _unpacked(first, rest)


def _packed(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The two messages of an object; the second one may be empty."""
    data = pickle.dumps(value)
    whole = bytearray(len(data).to_bytes(_SIZE_BYTES, "little") + data)
    whole.extend(bytes(max(0, _FIRST_BYTES - len(whole))))
    message = torch.frombuffer(whole, dtype=torch.uint8)
    return message[:_FIRST_BYTES], message[_FIRST_BYTES:]


def _unpacked(first: torch.Tensor, rest: torch.Tensor) -> Any:
    data = first.numpy().tobytes()[_SIZE_BYTES : _SIZE_BYTES + _size(first)] + rest.numpy().tobytes()
    return pickle.loads(data)  # noqa: S301 (pickled by another rank of this training)


def _left(first: torch.Tensor) -> int:
    """Size of the second message in bytes."""
    return max(0, _SIZE_BYTES + _size(first) - _FIRST_BYTES)


def _size(first: torch.Tensor) -> int:
    return int.from_bytes(first[:_SIZE_BYTES].numpy().tobytes(), "little")


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
