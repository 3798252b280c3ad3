"""Where the ranks of a run are: asking for their stacks, reading them, and putting equal ones together."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.records import Beat, from_dict
from hpcaccel.core.run_dir import RunDir, atomic_write, read_json
from hpcaccel.errors import RunDirectoryError

__all__ = ["Group", "RankStacks", "Thread", "ask", "group", "newest_dump", "wait_for_answers"]

ANSWER_SECONDS = 20.0
"""Besides three heartbeats: the supervisor looks every second, and signals those who do not answer by themselves."""
LOOK_SECONDS = 0.3

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_WAITING = ("/torch/distributed/", "/torch/autograd/graph.py", "/torch/cuda/", "/hpcaccel/runtime/together/")


@dataclass(frozen=True)
class Thread:
    """One thread's calls, innermost first, as ``file:line in function``."""

    name: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class RankStacks:
    """What one rank wrote."""

    rank: int
    node: str
    threads: tuple[Thread, ...]
    """The main thread first."""

    @property
    def main(self) -> tuple[str, ...]:
        return self.threads[0].calls if self.threads else ()


@dataclass(frozen=True)
class Group:
    """Ranks whose main threads are at the same place."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    calls: tuple[str, ...]
    """Innermost first; empty for ranks that have written nothing."""
    waits: bool
    """Whether that place is one where ranks wait for each other or for their device."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ask(run: RunDir, attempt: int) -> dict[int, int]:
    """Leave a request; how much each rank had written before, by rank. Nothing is asked where no rank can answer.

    Raises:
        RunDirectoryError: the request cannot be written.
    """
    before = {rank: _size(run, attempt, rank) for rank in _ranks(run, attempt)}
    if not before:
        return {}
    path = run.control / f"stacks-{time.time_ns()}-{secrets.token_hex(2)}"
    try:
        atomic_write(path, "", sync=False)
    except OSError as error:
        raise RunDirectoryError(f"cannot leave a request in {run.control}: {error.strerror}") from None
    return before


def wait_for_answers(run: RunDir, attempt: int, before: dict[int, int]) -> list[int]:
    """Wait a bounded time until each rank has written more than ``before``; those that have not."""
    beats = [beat.interval_seconds for rank in before if (beat := _beat(run, attempt, rank)) is not None]
    deadline = time.monotonic() + ANSWER_SECONDS + 3 * max(beats, default=0.0)
    silent = list(before)
    while silent and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        silent = [rank for rank in silent if _size(run, attempt, rank) <= before[rank]]
    time.sleep(LOOK_SECONDS)  # a dump is written line by line
    return silent


def newest_dump(run: RunDir, attempt: int) -> list[RankStacks]:
    """What each rank of an attempt wrote last; ranks that never wrote are left out."""
    found = []
    for rank in _ranks(run, attempt):
        path = run.stacks(attempt) / f"{rank}.txt"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        beat = _beat(run, attempt, rank)
        threads = _last_dump(text, main=beat.thread if beat is not None else "")
        if threads:
            found.append(RankStacks(rank, beat.host if beat is not None else "?", tuple(threads)))
    return found


def group(stacks: Sequence[RankStacks]) -> list[Group]:
    """Ranks at the same place together; first those that are alone somewhere, and of these first who does not wait."""
    by_place: dict[tuple[str, ...], list[RankStacks]] = {}
    for one in stacks:
        by_place.setdefault(one.main, []).append(one)
    groups = [
        Group(
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

    faulthandler writes the newest thread first and the main thread last; a thread that comes again begins a new dump.
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
                dumps.append({})  # the line with the time, above a dump that nobody had to signal for
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
        with path.open("rb") as file:  # opened: NFS answers from its memory where a file is only looked at
            return file.seek(0, 2)
    except FileNotFoundError:
        return 0
