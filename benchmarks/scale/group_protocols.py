"""Simulated rendezvous, stop agreement and commit at any number of ranks, from measured constants."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcaccel.checkpoint.rank_blocks import BLOCK
from hpcaccel.runtime.distributed.wide_groups import WIDE, WIDTH
from scale.cost_term import CostTerm
from scale.event_clock import EventClock, QueueServer
from scale.plan_costs import TENSORS as MEASURED_TENSORS

__all__ = ["OPERATION_SECONDS", "Protocols", "Rendezvous"]

OPERATION_SECONDS = (0.0002, 0.002)
"""Assumed times of one metadata operation on a shared file system, idle and under load. The operations are counted on a
local disk, where they take microseconds."""
BYTES_PER_SECOND = 1e9
"""Assumed for a connection between two nodes."""
TENSORS = 1000
"""Tensors of the model whose index ``LeftOver`` describes."""
PARTS_OPERATIONS = 5
"""Operations with which rank 0's writer writes and syncs ``ranges.json``, if there are several blocks."""
MEASURED_WIDTH = 4
"""Ranks of a group in the measured trees, so that few ranks make several levels."""


@dataclass(frozen=True)
class Rendezvous:
    """Seconds until all ranks have checked in; requests, and the longest queue at the store."""

    seconds: float
    requests: int
    longest_queue: int


@dataclass(frozen=True)
class LeftOver:
    """Costs that grow with the number of ranks and have not been redesigned.

    Args:
        index_bytes: of the index of ``TENSORS`` tensors, each of which is split over all ranks, all parts together.
        load_bytes, parse_seconds: of the part of the index that a rank reads at a load, if its block has saved what it
            loads.
        entries: of the folders of the heartbeats, and of the logs of an attempt.
    """

    store_requests: int
    store_seconds: float
    index_bytes: float
    load_bytes: float
    parse_seconds: float
    manifest_bytes: float
    entries: float


@dataclass(frozen=True)
class Protocols:
    """The protocols, by the constants that were measured.

    Args:
        terms: cost terms by name, see ``measuring``.
        request_seconds: time in which the store serves one request.
        cores: of the machine that measured.
    """

    terms: dict[str, CostTerm]
    request_seconds: float
    cores: int = 2

    @classmethod
    def of(cls, terms: dict[str, CostTerm], constants: dict[str, Any]) -> Protocols:
        """The protocols by what ``measuring`` has measured or read."""
        return cls(terms, constants["store_request_seconds"], constants["cores"])

    def rendezvous(self, ranks: int, *, start_seconds: float = 0.0, seed: int = 0) -> Rendezvous:
        """Simulate the check-in: each rank sends its requests one after the other, rank 0 polls a counter every 10 ms,
        and the store serves one request at a time.

        Args:
            start_seconds: the ranks start within this time. 0 is the worst case: all at once.
        """
        clock, source = EventClock(), random.Random(seed)
        store = QueueServer(clock)
        arrived = released = 0
        per_rank = round(self.terms["check-in: requests of all ranks"].coefficients[1])

        def request(then: Callable[[], None]) -> None:
            store.request(self.request_seconds, then)

        def begin(left: int) -> Callable[[], None]:
            def done() -> None:
                nonlocal arrived
                if left > 1:
                    request(begin(left - 1))
                else:
                    arrived += 1

            return done

        def poll() -> None:
            if arrived == ranks:
                request(release)
            else:
                clock.after(0.01, lambda: request(poll))

        def release() -> None:
            nonlocal released
            released = ranks

        for _ in range(ranks):
            # The last request is the wait for all: the store answers it to every rank after rank 0's release.
            clock.after(source.uniform(0.0, start_seconds), lambda: request(begin(per_rank - 1)))
        clock.after(0.0, lambda: request(poll))
        seconds = clock.run() + ranks * self.request_seconds
        assert released == ranks
        return Rendezvous(seconds, store.requests + ranks, store.longest_queue)

    def group_requests(self, ranks: int, *, lazy: bool) -> float:
        """Requests of all ranks together for the creation of one gloo group."""
        return ranks * self.terms[f"group, {'lazy' if lazy else 'full mesh'}: requests of a rank"].predict(ranks)

    def group_seconds(self, ranks: int, *, lazy: bool) -> float:
        """Seconds in which the store has served these requests."""
        return self.group_requests(ranks, lazy=lazy) * self.request_seconds

    @property
    def message_seconds(self) -> float:
        """Time of one message between two ranks, from the ring all-reduce of one number: 2 (P - 1) messages in turn."""
        return self.terms["one ring all-reduce"].coefficients[1] / 2

    @property
    def tree_message_seconds(self) -> float:
        """The same in a tree, where Python starts each operation, from the smallest measured tree."""
        ranks, seconds = min(self.terms["tree all-reduce"].measured.items())
        return seconds / _messages(ranks, MEASURED_WIDTH, self.cores)

    def ring_seconds(self, ranks: int) -> float:
        """Seconds of an all-reduce along one ring of all ranks."""
        return _messages(ranks, ranks) * self.message_seconds

    def agreement_seconds(self, ranks: int) -> float:
        """Seconds of a stop agreement: along a ring up to ``WIDE`` ranks, else along a tree of groups."""
        if ranks <= WIDE:
            return self.ring_seconds(ranks)
        return _messages(ranks, WIDTH) * self.tree_message_seconds

    def call_seconds(self, ranks: int, *, row_bytes: int = 0) -> float:
        """Seconds of a call of the script, such as ``wait_for_everyone``, or ``gather`` of ``row_bytes`` of each rank.

        Along a ring up to ``WIDE`` ranks. Else the ranks reduce their headers along a tree, and gather along the tree
        what the script gathers: its groups pass the whole table on.
        """
        if ranks <= WIDE:
            return self.call_ring_seconds(ranks)
        messages, tables = float(_messages(ranks, WIDTH)), 0.0
        if row_bytes:
            gather = _messages(ranks, WIDTH, reduces=False)
            messages += gather
            tables = gather - _messages(ranks, WIDTH, reduces=False, returns=False)
        return messages * self.tree_message_seconds + tables * row_bytes * ranks / BYTES_PER_SECOND

    def call_ring_seconds(self, ranks: int) -> float:
        """The same along one ring of all ranks: P - 1 messages in turn."""
        return (ranks - 1) * self.message_seconds

    def plan(self, ranks: int) -> tuple[float, float]:
        """Bytes of a message, and seconds at rank 0, of a new plan of ``TENSORS`` tensors."""
        times = TENSORS / MEASURED_TENSORS
        message, seconds = (self.terms[f"plan: {what}"].predict(ranks) for what in ("bytes of a message", "rank 0"))
        return message * times, seconds * times + message * times * math.ceil(math.log2(ranks)) / BYTES_PER_SECOND

    def left_over(self, ranks: int) -> LeftOver:
        """What still grows with the number of ranks, see ``LeftOver``."""

        def of_all_tensors(term: str, ranks: int = ranks) -> float:
            return self.terms[term].coefficients[1] * ranks * TENSORS / MEASURED_TENSORS

        of_a_part = min(ranks, BLOCK)
        return LeftOver(
            store_requests=self.rendezvous(ranks).requests,
            store_seconds=self.rendezvous(ranks).seconds,
            index_bytes=of_all_tensors("plan: bytes of the index"),
            load_bytes=of_all_tensors("plan: bytes of the index", of_a_part),
            parse_seconds=of_all_tensors("plan: parsing the index", of_a_part),
            manifest_bytes=self.manifest_bytes(ranks),
            entries=self.terms["attempt: entries of a folder"].predict(ranks),
        )

    def simulated(self) -> dict[str, dict[int, float]]:
        """What was simulated and measured, by term and number of ranks."""
        trees = self.terms["tree all-reduce"].measured
        return {
            "tree all-reduce": {
                size: _messages(size, MEASURED_WIDTH, self.cores) * self.tree_message_seconds
                for size in sorted(trees)[1:]
            },
            "commit: operations of rank 0, in blocks": {
                size: self.commit_operations(size)
                for size in self.terms["commit: operations of rank 0, in blocks"].measured
            },
            "check-in": {size: self.rendezvous(size).seconds for size in self.terms["check-in"].measured if size >= 16},
        }

    def commit_operations(self, ranks: int) -> float:
        """Operations on the file system by rank 0's writer after the last file is written, and after the last block is
        merged: one for each report, or for each block."""
        parts = 0 if ranks <= BLOCK else PARTS_OPERATIONS
        return self.terms["commit: operations of rank 0"].predict(_entries(ranks)) + parts

    def manifest_bytes(self, ranks: int) -> float:
        """Size of the manifest. It lists the files of all ranks, of more than ``BLOCK`` ranks one table per block."""
        blocks = "" if ranks <= BLOCK else ", in blocks"
        return self.terms[f"commit: bytes of the manifest{blocks}"].predict(ranks)

    def commit_seconds(self, ranks: int, *, operation_seconds: float) -> float:
        """Seconds from the last written file to the commit: the merge of the last block, rank 0's operations in turn,
        and the index."""
        of_block = min(ranks, BLOCK)
        computed = self.terms["commit: gather"].predict(of_block) + self.terms["commit: publish"].predict(of_block)
        if ranks > BLOCK:
            computed += self.terms["commit: gather and publish, in blocks"].predict(ranks)
        return self.commit_operations(ranks) * operation_seconds + computed


def _entries(ranks: int) -> int:
    """Number of ranks, or of blocks of ranks if there are several."""
    return ranks if ranks <= BLOCK else math.ceil(ranks / BLOCK)


def _messages(ranks: int, width: int, cores: int | None = None, *, reduces: bool = True, returns: bool = True) -> float:
    """Messages one after the other in an all-reduce along a tree of groups of ``width`` ranks.

    Args:
        cores: number of cores that do the work of all ranks; None if each rank has one. The groups of a level then take
            turns.
        reduces: False for an all-gather, whose rings pass each message on once, not twice.
        returns: whether the messages on the way back count.
    """
    messages, left = 0.0, ranks
    while left > 1:
        group, groups = min(width, left), -(-left // width)
        rounds = 1.0 if cores is None else max(1.0, groups / cores)
        messages += rounds * (2 if reduces else 1) * (group - 1)
        if groups > 1 and returns:  # below the topmost group, the result is broadcast on the way back
            messages += rounds * (math.ceil(math.log2(group)) if cores is None else group - 1)
        left = groups
    return messages
