"""Which node is to blame: a node whose connections are all bad, rather than the nodes at their other ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["bad_links", "blamed_for_links", "slow_links"]

N = TypeVar("N", bound=Hashable)

SLOW_BANDWIDTH = 0.4
"""A link is slow below this share of the fastest links' bandwidth."""
SLOW_LATENCY, SLOW_LATENCY_US = 10.0, 1000.0
"""A link is slow above this multiple of the shortest latencies, and this many µs above them."""
OUTLIERS = 10
"""One in this many links may be much faster than the others, such as two nodes at one switch."""


def blamed_for_links(links: Iterable[tuple[N, N]]) -> tuple[list[N], list[tuple[N, N]]]:
    """The ends to blame for the bad ``links``, and the links that they do not explain, where either end may be at
    fault.

    An end with several bad links is blamed for all of them, beginning with the end that has most. An end whose link to
    itself is bad is blamed, too.
    """
    left = set(links)
    blamed: list[N] = []
    while left:
        counts = Counter(end for link in left for end in set(link))
        most = max(counts.values())
        if most == 1:
            break
        worst = [end for end, count in counts.items() if count == most]
        blamed.append(min(worst, key=str))
        left = {link for link in left if blamed[-1] not in link}
    own = [link[0] for link in left if link[0] == link[1]]
    return [*blamed, *own], sorted((link for link in left if link[0] != link[1]), key=str)


def slow_links(bandwidths: Mapping[tuple[N, N], float], latencies: Mapping[tuple[N, N], float]) -> set[tuple[N, N]]:
    """The links that are much slower than the fastest ones, by MB/s or µs."""
    slow: set[tuple[N, N]] = set()
    if len(bandwidths) > 1:
        fast = sorted(bandwidths.values())[-1 - len(bandwidths) // OUTLIERS]
        slow |= {link for link, value in bandwidths.items() if value < SLOW_BANDWIDTH * fast}
    if len(latencies) > 1:
        short = sorted(latencies.values())[len(latencies) // OUTLIERS]
        limit = max(SLOW_LATENCY * short, short + SLOW_LATENCY_US)
        slow |= {link for link, value in latencies.items() if value > limit}
    return slow


def bad_links(unreachable: Mapping[N, Iterable[N]]) -> set[tuple[N, N]]:
    """Undirected links from what each end cannot reach."""
    found = {frozenset((one, other)) for one, others in unreachable.items() for other in others}
    return {tuple(sorted(link, key=str)) for link in found if len(link) == 2}  # type: ignore[misc]
