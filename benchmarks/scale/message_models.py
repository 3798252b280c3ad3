"""Messages and bytes that a rank sends in gloo's collectives and in hpcaccel's trees of groups, as formulas.

They follow gloo's algorithms: a reduction passes each segment twice around the ring, an all-gather passes each rank's
row once around it in two halves, a broadcast follows a binomial tree. Every message of data is announced by its sender
and asked for by its receiver, each with a header of ``HEADER_BYTES``; so has the data itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcaccel.runtime.distributed.wide_groups import WIDTH, tree_levels

__all__ = ["WORD_BYTES", "Sent", "busiest_of_ring", "busiest_of_tree"]

HEADER_BYTES = 48
WORD_BYTES = 8


class Sent(NamedTuple):
    """What one rank sends: messages, headers alone included, and bytes."""

    messages: int
    bytes: int

    @classmethod
    def of(cls, sends: int, receives: int, data_bytes: int) -> Sent:
        messages = 2 * sends + receives
        return cls(messages, HEADER_BYTES * messages + data_bytes)

    def plus(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes)


def ring_reduction(place: int, ranks: int, words: int) -> Sent:
    """Of the rank at ``place`` in an all-reduce of ``words`` numbers: two segments per rank, without empty ones."""
    most = math.ceil(words / (2 * ranks))
    sends = receives = data = 0
    for segment in range(math.ceil(words / most)):
        owner = segment // 2
        times = 2 - (place == owner % ranks) - (place == (owner + 1) % ranks)
        sends += times
        receives += 2 - (place == owner % ranks) - (place == (owner - 1) % ranks)
        data += times * WORD_BYTES * min(most, words - segment * most)
    return Sent.of(sends, receives, data)


def ring_gather(ranks: int, row_bytes: int) -> Sent:
    """Of each rank in an all-gather: the rows of all ranks but one, each in two halves."""
    hops = 2 * (ranks - 1)
    return Sent.of(hops, hops, (ranks - 1) * row_bytes)


def broadcast(place: int, ranks: int, data_bytes: int) -> Sent:
    """Of the rank at ``place``; the one at 0 has the data."""
    distances = (1 << bit for bit in range(ranks.bit_length()))
    children = sum(1 for distance in distances if place % (2 * distance) == 0 and place + distance < ranks)
    return Sent.of(children, int(place > 0), children * data_bytes)


def busiest_of_ring(ranks: int, *, words: int = 0, row_bytes: int = 0) -> Sent:
    """Most messages and most bytes of a rank in an all-reduce of ``words`` numbers and an all-gather of ``row_bytes``
    of each rank, along one ring of all ranks."""
    totals = []
    for place in range(ranks):
        total = ring_reduction(place, ranks, words) if words else Sent(0, 0)
        totals.append(total.plus(ring_gather(ranks, row_bytes)) if row_bytes else total)
    return _most(totals)


def busiest_of_tree(ranks: int, *, words: int = 0, row_bytes: int = 0, width: int = WIDTH) -> Sent:
    """The same along a tree of groups of ``width`` ranks."""
    top = max(level for level, _ in tree_levels(0, ranks, width))
    rows = math.ceil(ranks / width**top) * width**top
    totals = []
    for rank in range(ranks):
        total = Sent(0, 0)
        for level, members in tree_levels(rank, ranks, width):
            place, size = members.index(rank), len(members)
            passed_on = level < top
            if words:
                total = total.plus(ring_reduction(place, size, words))
                total = total.plus(broadcast(place, size, words * WORD_BYTES)) if passed_on else total
            if row_bytes:
                total = total.plus(ring_gather(size, row_bytes * width**level))
                total = total.plus(broadcast(place, size, rows * row_bytes)) if passed_on else total
        totals.append(total)
    return _most(totals)


def _most(totals: list[Sent]) -> Sent:
    return Sent(max(one.messages for one in totals), max(one.bytes for one in totals))
