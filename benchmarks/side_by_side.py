"""Compare the cost of several implementations, each as a difference to a baseline.

On a shared machine the speed drifts by more than the differences. Therefore the implementations take turns in short
pieces, each piece is compared with the baseline's piece of the same turn, and the median of the turns counts.

``run_ranks`` starts the processes of a benchmark that has several ranks.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Added", "added", "run_ranks", "turns"]


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


def run_ranks(program: str, arguments: Sequence[str], *, ranks: int) -> Any:
    """Start ``program`` once for each rank, with ``--port`` for the rendezvous and ``--rank``.

    Returns:
        What rank 0 has printed as its last line, which is JSON.

    Raises:
        SystemExit: a rank failed; the message is what the ranks have written to standard error.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, program, *arguments, "--port", str(port), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as errors:
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=errors, env=environment)
            for rank in range(ranks)
        ]
        printed = [rank.communicate()[0] for rank in started]
        errors.seek(0)
        if any(rank.returncode for rank in started):
            sys.exit(f"a rank failed:\n{errors.read()}")
    return json.loads(printed[0].splitlines()[-1])
