"""Compare the cost of several implementations, each as a difference to a baseline.

On a shared machine the speed drifts by more than the differences. Therefore the implementations take turns in short
pieces, each piece is compared with the baseline's piece of the same turn, and the median of the turns counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Added", "added", "turns"]


@dataclass(frozen=True)
class Added:
    """Seconds per call: of the baseline, and added by each implementation."""

    baseline: float
    by: Mapping[str, float]


def turns(ways: Mapping[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each implementation, one figure per round; ``calls`` calls in a row are a piece."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        _piece(way, calls)  # caches, first allocations
    order = list(ways.items())
    for number in range(rounds):
        # Nobody always runs after the same neighbour.
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            found[name].append(_piece(way, calls))
    return found


def added(
    baseline: Callable[[], object], ways: Mapping[str, Callable[[], object]], *, rounds: int = 101, calls: int = 40
) -> Added:
    """Median extra time of each implementation over the baseline of the same round."""
    found = turns({"": baseline, **ways}, rounds=rounds, calls=calls)
    bare = found.pop("")
    more = {
        name: statistics.median(one - other for one, other in zip(seconds, bare, strict=True))
        for name, seconds in found.items()
    }
    return Added(statistics.median(bare), more)


def _piece(way: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - begin) / calls
