"""Exchange of the messages that start a script's collective call: which call each rank makes, and its data or objects.

An exchange starts with one all-gather of fixed size. If ranks make different calls, or the same call with different
shapes, all ranks raise an error at once instead of hanging or mixing their data. Up to ``INLINE_BYTES`` bytes of data
are sent in this first message; more data needs a second collective.

More than ``wide_groups.WIDE`` ranks first reduce the smallest and the largest of their headers along a tree. If the
headers are equal, as in ``wait_for_everyone``, no rank receives those of the others: the bytes of a call without data
do not grow with the number of ranks. Messages of up to ``TREE_BYTES`` bytes go along the tree, larger ones along
gloo's ring.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpcaccel.errors import DistributedOperationException, HpcaccelError
from hpcaccel.runtime.distributed import wide_groups
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog
from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["Exchange", "ExchangeInterrupted", "RankMessages"]

HEADER_WORDS = 4
"""Number of 8-byte integers in a header: hash of the call's name, hash of its form, the caller's value, number of data
bytes."""
INLINE_BYTES = 224
"""Maximum number of data bytes in the first message of a call."""
_INTERRUPTION = -1
"""Sent in place of the call's hash: this rank interrupts the other ranks' calls."""
MESSAGE_WORDS = HEADER_WORDS + INLINE_BYTES // 8
TREE_BYTES = 4096
"""Larger messages arrive sooner along a ring of all ranks, where each link carries every message once."""
TREE_MARGIN_SECONDS = 60.0
"""The groups of the tree time out so much later than the watchdog, whose error names the call and the missing ranks."""
_trees = count()
"""Numbers of the trees that this process has made; the same on all ranks."""
_YES = ("1", "true", "yes", "on", "y", "t")
_DIFFERENCE = "the comparison of the ranks' calls"


class ExchangeInterrupted(HpcaccelError):
    """Another rank has interrupted this rank's collective call."""


class RankMessages:
    """The messages of one call, by rank."""

    def __init__(self, headers: list[list[int]], table: torch.Tensor, first_rank: int = 0) -> None:
        self.values = [header[2] for header in headers]
        self.sizes = [header[3] for header in headers]
        self.table = table
        """Data by rank: (ranks, bytes) uint8, as wide as the longest data. If the data was broadcast, only
        ``first_rank``'s row."""
        self._first_rank = first_rank

    def data(self, rank: int) -> torch.Tensor:
        """The data of ``rank``: (bytes,) uint8."""
        return self.table[rank - self._first_rank, : self.sizes[rank]]


class Exchange:
    """Runs the script's collective calls, one at a time, on a separate process group."""

    def __init__(self, group: dist.ProcessGroup, watchdog: CollectiveWatchdog) -> None:
        self.group = group
        self.watchdog = watchdog
        self.debug = os.environ.get("HPCACCEL_DEBUG", os.environ.get("ACCELERATE_DEBUG_MODE", "")).lower() in _YES
        """Whether the ranks compare all calls that have only GPU tensors, not just the first few."""
        self.device_calls = 0
        """Number of calls so far that had only GPU tensors."""
        self._tree = _tree_of(watchdog) if watchdog.world_size > wide_groups.WIDE else None
        self._mine = torch.zeros(MESSAGE_WORDS, dtype=torch.int64)
        self._whole_table = torch.zeros(self._table_rows, MESSAGE_WORDS, dtype=torch.int64)
        self._table = self._whole_table[: watchdog.world_size]
        self._rows = list(self._table.unbind())
        # Numpy views of the same memory: faster to write and to read than the tensors.
        self._header = self._mine[:HEADER_WORDS].numpy()
        self._headers = self._table[:, :HEADER_WORDS].numpy()
        self._inline = self._mine.view(torch.uint8)[8 * HEADER_WORDS :]
        self._inline_table = self._table.view(torch.uint8)[:, 8 * HEADER_WORDS :]

    def call(
        self,
        what: str,
        *,
        form: str = "",
        value: int = 0,
        data: torch.Tensor | None = None,
        source: int | None = None,
        interrupts: bool = False,
        limit: float | None = None,
    ) -> RankMessages:
        """Synchronise all ranks in this call and exchange their values and data.

        Args:
            what: name of the call in the script; the same on all ranks.
            form: text with the types and shapes that must be the same on all ranks; empty if there are none.
            value: this rank's signed 64-bit integer, for ``RankMessages.values``.
            data: (n,) uint8 on the CPU; n may differ from rank to rank.
            source: the only rank that sends data; default: all ranks send data.
            interrupts: make the other ranks' current call raise ``ExchangeInterrupted``, whichever call it is.
            limit: timeout in seconds; default: ``watchdog.timeout_seconds``.

        Raises:
            ExchangeInterrupted: another rank interrupts this call.
            DistributedOperationException: the ranks are in different calls, or their forms differ.
            RuntimeMisuse: some ranks do not take part.
            RankFailed: another rank has failed.
        """
        number = self.watchdog.enter()
        size = 0 if data is None else data.numel()
        header = [_INTERRUPTION if interrupts else zlib.crc32(what.encode()), zlib.crc32(form.encode()), value, size]
        if (equal := self._equal_headers(header, source, what, number, limit)) is not None:
            return self._data_of(equal, data, source, what, number, limit)
        self._header[:] = header
        if data is not None and size <= INLINE_BYTES:
            self._inline[:size] = data
        self._all_gather(self._whole_table, self._mine, what, number, limit, rows=self._rows)
        headers = self._headers.tolist()
        if any(other[:2] != header[:2] for other in headers):
            interrupting = [rank for rank, other in enumerate(headers) if other[0] == _INTERRUPTION]
            if not interrupting:
                self._raise_difference(what, form, number, limit)
            if not interrupts:
                raise ExchangeInterrupted(f"{ranks_text(interrupting)} aborted {what} at {call_site()}: out of memory")
            return RankMessages(headers, self._inline_table[:, :0])
        longest = max(other[3] for other in headers)
        if longest <= INLINE_BYTES:
            return RankMessages(headers, self._inline_table[:, :longest].clone())
        return self._data_of(headers, data, source, what, number, limit)

    def wait(self, work: Any, what: str, limit: float | None = None) -> None:
        """Wait for ``work``, a further collective of the latest call.

        Raises:
            RuntimeMisuse, RankFailed: as in ``call``.
        """
        self.watchdog.wait(work, what, number=self.watchdog.entered["calls"], limit=limit)

    def objects_from_all(self, value: Any, *, what: str) -> list[Any]:
        """All ranks' ``value`` (any Python object), in rank order. Raises the errors of ``call``."""
        messages = self.call(what, data=_pickled(value))
        return [_unpickled(messages.data(rank)) for rank in range(self.watchdog.world_size)]

    def object_from(self, source: int, value: Any, *, what: str, form: str = "") -> Any:
        """Rank ``source``'s ``value`` (any Python object), on every rank. Raises the errors of ``call``."""
        is_source = self.watchdog.rank == source
        messages = self.call(what, form=form, data=_pickled(value) if is_source else None, source=source)
        return value if is_source else _unpickled(messages.data(source))

    def _equal_headers(
        self, header: list[int], source: int | None, what: str, number: int, limit: float | None
    ) -> list[list[int]] | None:
        """All ranks' headers, if there is a tree and they are equal. If only ``source`` sends data, its number of bytes
        may differ from the others' zero. Else None, on all ranks."""
        if self._tree is None:
            return None
        bounds = torch.tensor([*header, *(~field for field in header)])
        self.watchdog.wait(self._tree.reduce(bounds, dist.ReduceOp.MAX), what, number=number, limit=limit)
        found = bounds.tolist()
        equal = [high == ~low for high, low in zip(found[:HEADER_WORDS], found[HEADER_WORDS:], strict=True)]
        if not all(equal[:3]) or (source is None and not equal[3]):
            return None
        headers = [[*header[:3], 0 if source is not None else header[3]]] * self.watchdog.world_size
        if source is not None:
            headers[source] = [*header[:3], found[3]]
        return headers

    def _data_of(
        self,
        headers: list[list[int]],
        data: torch.Tensor | None,
        source: int | None,
        what: str,
        number: int,
        limit: float | None,
    ) -> RankMessages:
        """The messages of a call whose data is not in the first message."""
        sizes = [header[3] for header in headers]
        if not any(sizes):
            return RankMessages(headers, torch.empty(len(sizes), 0, dtype=torch.uint8))
        if source is None:
            return RankMessages(headers, self._gather_bytes(data, sizes, what, number, limit))
        box = torch.empty(sizes[source], dtype=torch.uint8) if data is None else data
        work = dist.broadcast(box, src=source, group=self.group, async_op=True)
        self.watchdog.wait(work, what, number=number, limit=limit)
        return RankMessages(headers, box[None], source)

    def _gather_bytes(
        self, data: torch.Tensor | None, sizes: Sequence[int], what: str, number: int, limit: float | None
    ) -> torch.Tensor:
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8) if data is None or data.numel() < longest else data
        if data is not None and mine is not data:
            mine[: data.numel()] = data
        table = torch.empty(self._table_rows, longest, dtype=torch.uint8)
        self._all_gather(table, mine, what, number, limit)
        return table[: len(sizes)]

    @property
    def _table_rows(self) -> int:
        """Number of rows of a table for ``_all_gather``: one for each rank and, with a tree, some more."""
        return self.watchdog.world_size if self._tree is None else self._tree.rows

    def _all_gather(
        self,
        table: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        number: int,
        limit: float | None,
        rows: list[torch.Tensor] | None = None,
    ) -> None:
        """Fill ``table`` with the row ``mine`` of each rank. ``rows``: its rows, if the caller has them."""
        work: Any
        if self._tree is not None and mine.nbytes <= TREE_BYTES:
            table[self.watchdog.rank] = mine
            work = self._tree.gather(table)
        else:
            rows = list(table[: self.watchdog.world_size].unbind()) if rows is None else rows
            # dist.all_gather does the same, but spends some microseconds on checks.
            work = self.group.allgather([rows], [mine])
        self.watchdog.wait(work, what, number=number, limit=limit)

    def _raise_difference(self, what: str, form: str, number: int, limit: float | None) -> NoReturn:
        """Gather the descriptions of the ranks' differing calls and raise the same error on every rank."""
        text = f"{what}{' of ' + form if form else ''} at {call_site()}".encode()
        sizes = torch.empty(self._table_rows, 1, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(text)]), _DIFFERENCE, number, limit)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lengths = [int(item) for item in sizes[: self.watchdog.world_size]]
        table = self._gather_bytes(data, lengths, _DIFFERENCE, number, limit)
        texts = [bytes(row[:length].tolist()).decode() for row, length in zip(table, lengths, strict=True)]
        raise DistributedOperationException(_difference(texts))


def _tree_of(watchdog: CollectiveWatchdog) -> wide_groups.RankTree:
    """The tree of all ranks for the script's calls. It is not that of the stop agreement, which runs beside them."""
    store = dist.PrefixStore(f"hpcaccel/calls/{next(_trees)}", dist.distributed_c10d._get_default_store())
    timeout = timedelta(seconds=watchdog.timeout_seconds + TREE_MARGIN_SECONDS)
    return wide_groups.RankTree(store, watchdog.rank, watchdog.world_size, timeout=timeout)


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 (pickled by another rank of this training)


def _difference(texts: Sequence[str]) -> str:
    places: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        places.setdefault(text, []).append(rank)
    odd = _odd_ones(list(places.values()))
    # List the differing ranks first, so that a truncated message still contains them.
    ordered = sorted(places.items(), key=lambda item: not odd.issuperset(item[1]))
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in ordered]
    differ = f"; {ranks_text(sorted(odd))} {'differs' if len(odd) == 1 else 'differ'}:" if odd else ":"
    calls = {text.partition(" ")[0] for text in texts}
    if len(calls) > 1:
        first = f"the ranks make different collective calls{differ}"
        last = "All ranks must make the same calls in the same order: check whether one is inside `if is_main_process:`"
    else:
        (call,) = calls
        first = f"{call} needs matching arguments on all ranks{differ}"
        last = _HINTS.get(call, "Pass objects of the same types and sizes, in the same order, on all ranks")
    return "\n".join([first, *lines, last])


def _odd_ones(groups: Sequence[list[int]]) -> set[int]:
    """The ranks outside the majority; none if no group is larger than all other groups together."""
    largest = max(groups, key=len)
    others = {rank for group in groups if group is not largest for rank in group}
    return others if len(largest) > len(others) else set()


_EQUAL_LENGTHS = "Pad tensors to the same length with pad_across_processes, or collect objects with gather_object"
_HINTS = {"gather": _EQUAL_LENGTHS, "gather_for_metrics": _EQUAL_LENGTHS, "reduce": _EQUAL_LENGTHS}
