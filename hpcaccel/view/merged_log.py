"""Logs of all ranks of an attempt as one list of lines, and the traceback of the rank that failed first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.view.rank_states import rank_in_detail, read_hang

__all__ = ["LogLine", "first_traceback", "merged_log"]

LIMIT = 2000
"""Default number of lines."""
MOST_FILES = 256
"""Maximum number of rank logs that are merged: those of the lowest ranks, and that of the rank that failed first."""
TAIL_BYTES = 256 << 10
"""Only this many bytes at the end of each file are read."""
TRACEBACK_LINES = 400
LONGEST_LINE = 4000
"""Longer lines are cut."""

_TIME = re.compile(r"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
"""torch's prefix of each line of a rank's last traceback."""
_BEGIN = "Traceback (most recent call last)"
_CHAIN = ("The above exception was the direct cause of", "During handling of the above exception, another")


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of the merged log."""

    text: str
    sources: list[str] = field(default_factory=list)
    """Where the line was written: ranks' numbers, or ``supervisor``. Equal lines of several ranks are joined."""
    time: float | None = None
    """Time at the beginning of the line, or of an earlier line of the same file, in seconds since the epoch; None if
    the file has none before it."""


def merged_log(run: RunDir, attempt: int | None = None, *, limit: int = LIMIT) -> list[LogLine]:
    """The newest lines of the logs of an attempt's ranks and of its supervisor.

    Lines are sorted by the times that they begin with, as far as they have any. Lines without a time stay behind the
    line before them in the same file. Without any times, the files follow each other.

    Args:
        attempt: the attempt's number. Default: the newest one.
        limit: maximum number of lines.
    """
    numbers = numbered_folders(run.attempts)
    number = attempt if attempt is not None else max(numbers, default=0)
    lines = [line for path in _files(run, number) for line in _timed(path, limit)]
    order = sorted(range(len(lines)), key=lambda place: (lines[place].time or 0.0, place))
    return _joined([lines[place] for place in order])[-limit:]


def first_traceback(run: RunDir) -> tuple[int, str] | None:
    """The rank at fault in the last attempt that ended, and its last traceback, chained exceptions included.

    Without a traceback, the text is the end of that rank's log; for a hang, the stacks of the rank to blame. If no rank
    is known to be at fault, it is the lowest rank whose log has a traceback.

    Returns:
        None if that attempt did not fail, or if there is no such rank.
    """
    ledger = RunLedger.read(run)
    end = next((end for number in reversed(ledger.attempts) if (end := ledger.end_of(number)) is not None), None)
    if end is None or end.reason != "failed":
        return None
    hang = read_hang(run, end.attempt) if end.error_class == "hang" else None
    if hang is not None and hang.culprit_rank is not None:
        stacks = run.stacks(end.attempt) / f"{hang.culprit_rank}.txt"
        text = "\n".join(_tail(stacks)) if stacks.exists() else hang.why
        return hang.culprit_rank, text
    named = end.rank_blamed if end.rank_blamed is not None else rank_in_detail(end)
    ranks = (
        [named] if named is not None else sorted(int(path.stem) for path in _rank_logs(run, end.attempt))[:MOST_FILES]
    )
    for rank in ranks:
        lines = [_OF_TORCH.sub("", line) for line in _tail(run.rank_log(end.attempt, rank))]
        if text := _last_traceback(lines):
            return rank, text
        if named is not None and lines:
            return rank, "\n".join(lines[-40:])
    return None


def _last_traceback(lines: Sequence[str]) -> str:
    """The last traceback, and those before it to which it is chained; empty if there is none."""
    begins = [number for number, line in enumerate(lines) if _BEGIN in line]
    if not begins:
        return ""
    first = begins[-1]
    for begin in reversed(begins[:-1]):
        if not any(line.startswith(_CHAIN) for line in lines[begin:first]):
            break
        first = begin
    end = begins[-1] + 1
    while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end]):
        end += 1
    end += 1  # the exception itself
    while end < len(lines) and lines[end].startswith((" ", "\t")):  # a message of several lines
        end += 1
    return "\n".join(lines[first:end][-TRACEBACK_LINES:])


def _files(run: RunDir, attempt: int) -> Iterator[Path]:
    supervisor = run.supervisor_log(attempt)
    if supervisor.exists():
        yield supervisor
    logs = sorted(_rank_logs(run, attempt), key=lambda path: int(path.stem))
    yield from logs[:MOST_FILES]
    if len(logs) > MOST_FILES and (failed := first_traceback(run)) is not None and failed[0] >= MOST_FILES:
        yield run.rank_log(attempt, failed[0])


def _rank_logs(run: RunDir, attempt: int) -> list[Path]:
    return [path for path in run.attempt(attempt).glob("*.log") if path.stem.isdecimal()]


def _timed(path: Path, limit: int) -> Iterator[LogLine]:
    at: float | None = None
    for line in _tail(path)[-limit:]:
        match = _TIME.match(line)
        if match:
            try:
                at = datetime.fromisoformat(match[1].replace(",", ".")).timestamp()
            except ValueError:  # such as month 13: not a time
                pass
        yield LogLine(text=line, sources=[path.stem], time=at)


def _tail(path: Path) -> list[str]:
    """The whole lines in the last ``TAIL_BYTES`` of a file; [] if it does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    return [line.rpartition("\r")[2][:LONGEST_LINE] for line in data.decode(errors="replace").split("\n") if line]


def _joined(lines: Sequence[LogLine]) -> list[LogLine]:
    """``lines`` with equal neighbours of different ranks as one line."""
    found: list[LogLine] = []
    for line in lines:
        if found and found[-1].text == line.text and line.sources[0] not in found[-1].sources:
            found[-1].sources.extend(line.sources)
        else:
            found.append(LogLine(text=line.text, sources=list(line.sources), time=line.time))
    return found
