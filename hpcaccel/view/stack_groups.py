"""Stacks of a run's ranks: requests a dump, reads it, and groups ranks with equal stacks."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import leave_stacks_request

__all__ = ["RankStacks", "StackGroup", "Thread", "group", "newest_dump", "request_dump", "wait_for_dump"]

STACKS_TIMEOUT_SECONDS = 20.0
"""How long to wait for dumps, in addition to three heartbeat intervals: the supervisor polls for requests, and signals
all ranks if some have not written a dump."""
LOOK_SECONDS = 0.3

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_WAITING = (
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/cuda/",
    "/hpcaccel/runtime/distributed/collectives/",
    "/hpcaccel/runtime/together/",  # the folder of collectives in earlier versions
)


@dataclass(frozen=True)
class Thread:
    """Calls of one thread, innermost first, as ``file:line in function``."""

    name: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class RankStacks:
    """The stacks of one rank."""

    rank: int
    node: str
    threads: tuple[Thread, ...]
    """The main thread first."""

    @property
    def main(self) -> tuple[str, ...]:
        return self.threads[0].calls if self.threads else ()


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads have the same stack."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    calls: tuple[str, ...]
    """Calls, innermost first; empty if the main thread runs no Python code."""
    waits: bool
    """Whether the ranks are waiting for other ranks or for their device, judging by their innermost calls."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def request_dump(run: RunDir, attempt: int) -> dict[int, int]:
    """Request a stack dump if at least one rank has a heartbeat file.

    Returns:
        Size in bytes of each rank's dump file before the request, by rank; empty if no rank has a heartbeat file.

    Raises:
        RunDirectoryError: the request cannot be written.
    """
    before = {rank: _size(run, attempt, rank) for rank in _ranks(run, attempt)}
    if not before:
        return {}
    leave_stacks_request(run)
    return before


def wait_for_dump(run: RunDir, attempt: int, before: dict[int, int]) -> list[int]:
    """Wait, for a limited time, until each rank's dump file is larger than in ``before``. Returns the ranks whose file
    has not grown."""
    beats = [beat.interval_seconds for rank in before if (beat := _beat(run, attempt, rank)) is not None]
    deadline = time.monotonic() + STACKS_TIMEOUT_SECONDS + 3 * max(beats, default=0.0)
    silent = list(before)
    while silent and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        silent = [rank for rank in silent if _size(run, attempt, rank) <= before[rank]]
    time.sleep(LOOK_SECONDS)  # a dump is written line by line
    return silent


def newest_dump(run: RunDir, attempt: int) -> list[RankStacks]:
    """The last dump of each rank of an attempt; ranks without one are left out."""
    found = []
    for rank in _ranks(run, attempt):
        path = run.stacks(attempt) / f"{rank}.txt"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        beat = _beat(run, attempt, rank)
        threads = _last_dump(text, main=beat.thread if beat is not None else "")
        if threads:
            found.append(RankStacks(rank, beat.host if beat is not None else "?", tuple(threads)))
    return found


def group(stacks: Sequence[RankStacks]) -> list[StackGroup]:
    """Group ranks by the stack of their main thread. The smallest groups come first; among groups of the same size,
    those that do not wait come first."""
    by_place: dict[tuple[str, ...], list[RankStacks]] = {}
    for one in stacks:
        by_place.setdefault(one.main, []).append(one)
    groups = [
        StackGroup(
            ranks=tuple(one.rank for one in members),
            nodes=tuple(dict.fromkeys(one.node for one in members)),
            calls=place,
            waits=any(part in call for call in place[:8] for part in _WAITING),
        )
        for place, members in by_place.items()
    ]
    return sorted(groups, key=lambda one: (len(one.ranks), one.waits, one.ranks))


def _last_dump(text: str, *, main: str) -> list[Thread]:
    """The threads of the last dump in a file, the main thread first.

    faulthandler writes the newest thread first and the main thread last; a repeated thread begins a new dump.
    """
    dumps: list[dict[str, list[str]]] = [{}]
    calls: list[str] | None = None
    for line in text.splitlines():
        if match := _THREAD.match(line):
            if match[1] in dumps[-1]:
                dumps.append({})
            calls = dumps[-1][match[1]] = []
        elif (match := _FRAME.match(line)) and calls is not None:
            calls.append(f"{match[1]}:{match[2]} in {match[3]}")
        elif line.strip():
            if dumps[-1]:
                dumps.append({})  # the line with the time, above a dump that the rank wrote without a signal
            calls = None
    threads = [Thread(name, tuple(lines)) for name, lines in (dumps[-1] or dumps[max(0, len(dumps) - 2)]).items()]
    first = next((thread for thread in threads if thread.name == main), threads[-1] if threads else None)
    return [] if first is None else [first, *(thread for thread in threads if thread is not first)]


def _ranks(run: RunDir, attempt: int) -> list[int]:
    return sorted(int(path.stem) for path in run.heartbeats(attempt).glob("[0-9]*.json"))


def _beat(run: RunDir, attempt: int, rank: int) -> Beat | None:
    value = read_json(run.heartbeats(attempt) / f"{rank}.json")
    return None if value is None else from_dict(Beat, value)


def _size(run: RunDir, attempt: int, rank: int) -> int:
    path: Path = run.stacks(attempt) / f"{rank}.txt"
    try:
        with path.open("rb") as file:  # open it: NFS clients return a cached size for stat(2)
            return file.seek(0, 2)
    except FileNotFoundError:
        return 0
