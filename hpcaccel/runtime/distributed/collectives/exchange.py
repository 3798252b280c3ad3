"""What ranks tell each other in one collective: which call they are in, and some bytes.

Every call that the script makes together begins with the same message of fixed size, whatever the call is. So ranks
that call different things, or the same thing with different shapes, find it out at once and all of them, instead of
waiting or mixing their data. Little data travels inside the message; more follows in a second one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpcaccel.errors import DistributedOperationException, HpcaccelError
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.collectives.collective_watchdog import Rollcall
from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["Answers", "Exchange", "Interrupted"]

WORDS = 4
"""Of 8 bytes: the call, its form, a number of its own, how many bytes it brings."""
INLINE_BYTES = 224
_INTERRUPTION = -1
MESSAGE_WORDS = WORDS + INLINE_BYTES // 8
_YES = ("1", "true", "yes", "on", "y", "t")
_DIFFERENCE = "the comparison of the ranks' calls"


class Interrupted(HpcaccelError):
    """Another rank has broken off what the ranks were doing together, in the midst of a call."""


class Answers:
    """What each rank has said, by rank."""

    def __init__(self, words: list[list[int]], table: torch.Tensor, first_rank: int = 0) -> None:
        self.values = [word[2] for word in words]
        self.sizes = [word[3] for word in words]
        self.table = table
        """(ranks, bytes) uint8, as many columns as the longest answer has."""
        self._first_rank = first_rank

    def data(self, rank: int) -> torch.Tensor:
        """(bytes,) uint8."""
        return self.table[rank - self._first_rank, : self.sizes[rank]]


class Exchange:
    """The script's own collectives, on a group of their own, one after the other."""

    def __init__(self, group: dist.ProcessGroup, rollcall: Rollcall) -> None:
        self.group = group
        self.rollcall = rollcall
        self.debug = os.environ.get("HPCACCEL_DEBUG", os.environ.get("ACCELERATE_DEBUG_MODE", "")).lower() in _YES
        """Compare calls with GPU tensors, too."""
        self.device_calls = 0
        """With GPU tensors alone, so far."""
        self._mine = torch.zeros(MESSAGE_WORDS, dtype=torch.int64)
        self._table = torch.zeros(rollcall.world_size, MESSAGE_WORDS, dtype=torch.int64)
        self._rows = list(self._table.unbind())
        # The same memory, faster to write and to read than through a tensor.
        self._head = self._mine[:WORDS].numpy()
        self._heads = self._table[:, :WORDS].numpy()
        self._inline = self._mine.view(torch.uint8)[8 * WORDS :]
        self._inline_table = self._table.view(torch.uint8)[:, 8 * WORDS :]

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
    ) -> Answers:
        """Meet all ranks in this call, and tell each other what each one brings.

        Args:
            what: the call, as the script names it; the same on all ranks.
            form: types and shapes that must be the same on all ranks; empty: none.
            value: anything that fits into 64 bits, signed.
            data: (n,) uint8 on the CPU, of any length on each rank.
            source: the only rank whose data counts, the others bring none; default: all ranks'.
            interrupts: break off the others' call, whatever it is.
            limit: seconds; default: the timeout of what the script calls.

        Raises:
            Interrupted: another rank breaks off this call.
            DistributedOperationException: the ranks are in different calls, or their forms differ.
            RuntimeMisuse: some do not come.
            RankFailed: another rank has failed.
        """
        number = self.rollcall.enter()
        size = 0 if data is None else data.numel()
        head = [_INTERRUPTION if interrupts else zlib.crc32(what.encode()), zlib.crc32(form.encode()), value, size]
        self._head[:] = head
        if data is not None and size <= INLINE_BYTES:
            self._inline[:size] = data
        self._all_gather(self._rows, self._mine, what, number, limit)
        words = self._heads.tolist()
        if any(word[:2] != head[:2] for word in words):
            breaking = [rank for rank, word in enumerate(words) if word[0] == _INTERRUPTION]
            if not breaking:
                self._refuse(what, form, number, limit)
            if not interrupts:
                raise Interrupted(f"{ranks_text(breaking)} broke off {what} at {call_site()}: out of memory")
            return Answers(words, self._inline_table[:, :0])
        sizes = [word[3] for word in words]
        longest = max(sizes)
        if longest <= INLINE_BYTES:
            return Answers(words, self._inline_table[:, :longest].clone())
        if source is None:
            return Answers(words, self._gather_bytes(data, sizes, what, number, limit))
        box = torch.empty(sizes[source], dtype=torch.uint8) if data is None else data
        work = dist.broadcast(box, src=source, group=self.group, async_op=True)
        self.rollcall.wait(work, what, number=number, limit=limit)
        return Answers(words, box[None], source)

    def wait(self, work: Any, what: str, limit: float | None = None) -> None:
        """Wait for a collective that belongs to the call which the ranks have just met in.

        Raises:
            RuntimeMisuse, RankFailed: as in ``call``.
        """
        self.rollcall.wait(work, what, number=self.rollcall.entered["calls"], limit=limit)

    def _gather_bytes(
        self, data: torch.Tensor | None, sizes: Sequence[int], what: str, number: int, limit: float | None
    ) -> torch.Tensor:
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8) if data is None or data.numel() < longest else data
        if data is not None and mine is not data:
            mine[: data.numel()] = data
        table = torch.empty(len(sizes), longest, dtype=torch.uint8)
        self._all_gather(list(table.unbind()), mine, what, number, limit)
        return table

    def _all_gather(
        self, rows: list[torch.Tensor], mine: torch.Tensor, what: str, number: int, limit: float | None
    ) -> None:
        # torch's all_gather does the same, and asks around for some microseconds before.
        work = self.group.allgather([rows], [mine])
        self.rollcall.wait(work, what, number=number, limit=limit)

    def _refuse(self, what: str, form: str, number: int, limit: float | None) -> NoReturn:
        """The ranks are in different calls, or bring different things: each says which, and all of them say it."""
        text = f"{what}{' of ' + form if form else ''} at {call_site()}".encode()
        size = torch.tensor([len(text)])
        sizes = [torch.empty_like(size) for _ in range(self.rollcall.world_size)]
        self._all_gather(sizes, size, _DIFFERENCE, number, limit)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lengths = [int(item) for item in sizes]
        table = self._gather_bytes(data, lengths, _DIFFERENCE, number, limit)
        texts = [bytes(row[:length].tolist()).decode() for row, length in zip(table, lengths, strict=True)]
        raise DistributedOperationException(_difference(texts))


def _difference(texts: Sequence[str]) -> str:
    places: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        places.setdefault(text, []).append(rank)
    odd = _odd_ones(list(places.values()))
    # Those first, so that a long message cannot be cut before them.
    ordered = sorted(places.items(), key=lambda item: not odd.issuperset(item[1]))
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in ordered]
    differ = f", and {ranks_text(sorted(odd))} {'differs' if len(odd) == 1 else 'differ'}:" if odd else ":"
    calls = {text.partition(" ")[0] for text in texts}
    if len(calls) > 1:
        first = f"the ranks call different things, and would wait for each other{differ}"
        last = "All ranks must make the same calls in the same order: is one of them inside an `if is_main_process`?"
    else:
        (call,) = calls
        first = f"{call} needs the same on all ranks{differ}"
        last = _HINTS.get(call, "Give the same on all ranks, in the same order")
    return "\n".join([first, *lines, last])


def _odd_ones(groups: Sequence[list[int]]) -> set[int]:
    """The ranks that are not with the most; none where no group is larger than all others together."""
    largest = max(groups, key=len)
    others = {rank for group in groups if group is not largest for rank in group}
    return others if len(largest) > len(others) else set()


_EQUAL_LENGTHS = "Make tensors equally long with pad_across_processes, or collect objects with gather_object"
_HINTS = {"gather": _EQUAL_LENGTHS, "gather_for_metrics": _EQUAL_LENGTHS, "reduce": _EQUAL_LENGTHS}
