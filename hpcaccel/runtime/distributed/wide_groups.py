"""Process groups of many ranks: connections on demand; reductions and all-gathers along a tree of small groups.

gloo reduces and gathers along a ring of all ranks: 2 (P - 1) or P - 1 messages, one after the other. A ``RankTree``
does so in groups of ``WIDTH`` neighbouring ranks, then among the first ranks of these groups, and so on, and broadcasts
the result on the way back: the number of messages one after the other grows with the logarithm of P.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from hpcaccel.core.open_files import allow_open_files

__all__ = ["WIDE", "WIDTH", "RankTree", "allow_connections", "connect_on_demand", "tree_levels"]

WIDE = 64
"""Largest number of ranks that gloo connects with each other in advance, and that reduce along one ring."""
WIDTH = 16
"""Number of ranks of a group in the tree."""
OTHER_FILES = 512
"""Open files of rank 0 besides the store's connections: data, modules, connections of gloo and NCCL."""


def connect_on_demand(ranks: int) -> None:
    """Let gloo connect two ranks when they first exchange data, in groups of more than ``WIDE`` ranks.

    Otherwise each rank of a new group reads the addresses of all other ranks from the store, and connects to all of
    them: with 16,384 ranks, half a billion requests at the store of rank 0. With this setting of torch a rank publishes
    its own address, and reads those of its neighbours in the collectives. Set TORCH_GLOO_LAZY_INIT=0 to connect in
    advance. No effect in versions of torch without the setting.
    """
    if ranks > WIDE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def allow_connections(ranks: int) -> None:
    """Raise this process's limit of open files, if the store needs more for a connection to each rank."""
    allow_open_files(ranks + OTHER_FILES)


def tree_levels(rank: int, ranks: int, width: int = WIDTH) -> list[tuple[int, list[int]]]:
    """The groups of ``rank`` in the tree, as pairs of level and ranks, from the lowest level on.

    A group of level k has up to ``width`` ranks, which are multiples of ``width`` to the power of k. Only the first
    rank of a group belongs to a group of the level above. Groups of one rank are left out.
    """
    levels, level, stride = [], 0, 1
    while rank % stride == 0 and stride < ranks:
        first = rank - rank % (stride * width)
        members = list(range(first, min(first + stride * width, ranks), stride))
        if len(members) > 1:
            levels.append((level, members))
        level, stride = level + 1, stride * width
    return levels


class RankTree:
    """All-reduces and all-gathers of small tensors along a tree, one at a time. Creating it is collective.

    Args:
        store: a store of torch, with keys for this tree alone, through which the ranks find each other.
        rank, ranks: this rank's number and the number of ranks.
        timeout: of each operation.
        width: largest number of ranks of a group.
    """

    def __init__(self, store: Any, rank: int, ranks: int, *, timeout: timedelta, width: int = WIDTH) -> None:
        import torch.distributed as dist  # a single-process program may run without torch

        self._rank, self._width = rank, width
        self._top = max(level for level, _ in tree_levels(0, ranks, width))
        largest = width**self._top
        self.rows = -(-ranks // largest) * largest
        """Number of rows of a table for ``gather``: one for each rank, and what fills up the last topmost block."""
        # Not by new_group(), which all ranks would have to call for every group. Most ranks are in one group.
        self._groups: list[tuple[int, list[int], Any]] = []
        for level, members in tree_levels(rank, ranks, width):
            place = dist.PrefixStore(f"tree/{level}/{members[0]}", store)
            group = dist.ProcessGroupGloo(place, members.index(rank), len(members), timeout)
            # Never freed: the destructor waits for pending operations, so a rank that fails would hang at its end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._groups.append((level, members, group))

    def reduce(self, tensor: Any, op: Any) -> _ChainedWork:
        """Begin to reduce ``tensor`` in place. Every rank must wait for an operation before it starts the next one."""
        import torch.distributed as dist

        reduction = dist.AllreduceOptions()
        reduction.reduceOp = op
        steps = [partial(group.allreduce, [tensor], reduction) for _, _, group in self._groups]
        return _ChainedWork([*steps, *self._passing_on(tensor)])

    def gather(self, table: Any) -> _ChainedWork:
        """Begin to fill ``table``, which has ``self.rows`` rows: row r of rank r is copied to all ranks.

        A group gathers the rows that its members have from the groups below, which are neighbouring rows.
        """
        steps = []
        for level, members, group in self._groups:
            size = self._width**level
            blocks = [table[member : member + size] for member in members]
            steps.append(partial(group.allgather, [blocks], [table[self._rank : self._rank + size]]))
        return _ChainedWork([*steps, *self._passing_on(table)])

    def _passing_on(self, tensor: Any) -> list[Callable[[], Any]]:
        """The way back: all ranks of the topmost group have the result. Each group's first rank passes it on."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return [
            partial(group.broadcast, [tensor], options)
            for level, _, group in reversed(self._groups)
            if level < self._top
        ]


class _ChainedWork:
    """Asynchronous operations, each of which starts when the one before it is complete, in the thread that completes
    it. Has the methods of torch's ``Work`` that ``CollectiveWatchdog`` uses."""

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self._steps = iter(steps)
        self._ended = threading.Event()
        self._failure: str | None = None
        self._work: Any = None
        self._continue()

    def _continue(self, before: Any = None) -> None:
        try:
            if before is not None:
                before.value()  # raises if the operation before has failed
            step = next(self._steps, None)
            if step is None:
                self._ended.set()
            else:
                self._work = step()  # kept: an operation needs a reference until it is complete
                self._work.get_future().then(self._continue)
        except Exception as error:  # in a thread of gloo nothing else reports it
            self._failure = str(error)
            self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the last operation.

        Raises:
            RuntimeError: an operation has failed, or ``timeout`` has passed.
        """
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the reduction has not ended in time")
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()
