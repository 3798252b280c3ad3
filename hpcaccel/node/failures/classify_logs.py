"""Reads the logs of an attempt: last exceptions, Slurm's messages, and the ranks' ends as reported by srun."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.rank import LONGEST, read_tail
from hpcaccel.slurm import hostlist

__all__ = [
    "RankEnd",
    "RankLog",
    "rank_ends",
    "read_rank_logs",
    "read_slurm_lines",
    "slurm_intervened",
]

BLOCK_BYTES = 1 << 20
LINE_BYTES = 4096
"""Number of bytes at the end of a block that the next block repeats within a long line. Slurm's lines are shorter."""

_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\w*)(?:: (.*))?$")
_ANY_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
"""An exception with any name. Used only for a line directly below the last, indented line of a traceback."""
_CHAIN = re.compile(r"^(?:The above exception was the direct cause of|During handling of the above exception, another)")
_SRUN_END = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)$")
_OWN_END = re.compile(r"^hpcaccel: \S+ rank (?P<rank>\d+)(?: on (?P<node>\S+))?: (?P<how>[A-Z].*)$")
"""The line about a rank that failed first on the local backend or under a warm parent, in the words of srun."""
_OF_SLURM = re.compile(
    rb"\*\*\* (?:STEP|JOB) .* CANCELLED AT |(?:^|(?<=\r))(?:srun: (?:error|Force)|slurmstepd)", re.MULTILINE
)
"""Slurm's own lines in the logs of a step that it signalled or that lost ranks."""
_SLURM_MARKERS = (b" CANCELLED AT ", b"srun: ", b"slurmstepd")
"""Each line that ``_OF_SLURM`` matches contains one of these. Searching for them first is many times faster."""
_SRUN_KILLS = re.compile(r"^srun: .*(?:Terminating StepId|Force Terminated|Job step aborted)")


@dataclass(frozen=True, kw_only=True)
class RankLog:
    rank: int
    exceptions: list[str]
    """``Type: message``: the last exception first, then those chained to it (``__cause__``, ``__context__``)."""
    lines: list[str]
    """The last lines of the log."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of a rank, as srun or the supervisor reports it."""

    node: str
    """Empty on the local backend."""
    rank: int
    how: str
    """srun's text: ``Killed``, ``Exited with exit code 2``."""


def read_rank_logs(run: RunDir, attempt: int) -> list[RankLog]:
    """The ranks' logs of an attempt, in rank order."""
    return [_read(log) for log in _rank_logs(run, attempt)]


def _rank_logs(run: RunDir, attempt: int) -> list[Path]:
    logs = [log for log in run.attempt(attempt).glob("*.log") if log.stem.isdigit()]
    return sorted(logs, key=lambda log: int(log.stem))


def _read(log: Path) -> RankLog:
    # torch prefixes each line of a traceback with the rank
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line)[:4000] for line in read_tail(log).splitlines()]
    return RankLog(rank=int(log.stem), exceptions=_exceptions(lines), lines=lines)


def _exceptions(lines: list[str]) -> list[str]:
    """The exception of the last traceback, then the exceptions of earlier tracebacks that are chained to it."""
    if not any("Traceback (most recent call last)" in line for line in lines):
        return []
    found: list[str] = []
    chained = False
    for number, (above, line) in enumerate(zip(["", *lines], lines, strict=False)):
        if _CHAIN.match(line):
            chained = True
        elif _EXCEPTION.match(line) or (above.startswith("    ") and _ANY_EXCEPTION.match(line)):
            text = _whole_message(line.strip(), lines[number + 1 :])[:LONGEST]
            found = [text, *found] if chained or not found else [text]
            chained = False
    return found


def _whole_message(first: str, below: Sequence[str]) -> str:
    """An exception's message in one line. If the message's first line ends with a colon, the message continues in the
    indented lines below, and for hpcaccel's own exceptions in one more line of advice."""
    if not first.endswith(":"):
        return first
    more = list(itertools.takewhile(lambda line: line.startswith(("  ", "\t")) and 'File "' not in line, below))
    if not more:
        return first
    last = below[len(more)].strip() if len(below) > len(more) and first.startswith("hpcaccel.") else ""
    return f"{first} {'; '.join(line.strip() for line in more)}" + (f". {last}" if last else "")


def read_slurm_lines(run: RunDir, attempt: int) -> list[str]:
    """The batch step's output since this attempt began (at most the last 64 kB). It includes srun's messages."""
    try:
        lines = read_tail(run.slurm_log).splitlines()
    except FileNotFoundError:
        return []
    begin = re.compile(rf"^hpcaccel: \S+ attempt {attempt}: ")
    starts = [number for number, line in enumerate(lines) if begin.match(line)]
    return lines[starts[-1] :] if starts else lines


def slurm_intervened(run: RunDir, attempt: int) -> bool:
    """Whether the logs of this attempt contain a message from Slurm about ranks that it signalled or lost."""
    if any(_OF_SLURM.search(block) for log in _rank_logs(run, attempt) for block in _blocks_of_slurm(log)):
        return True
    begin = re.compile(rb"^hpcaccel: \S+ attempt %d: " % attempt, re.MULTILINE)
    found = False
    for block in _blocks(run.slurm_log):
        starts = [match.end() for match in begin.finditer(block)]
        if starts:  # the lines before belong to an earlier attempt
            found, block = False, block[starts[-1] :]
        found = found or _OF_SLURM.search(block) is not None
    return found


def _blocks_of_slurm(path: Path) -> Iterator[bytes]:
    return (block for block in _blocks(path) if any(word in block for word in _SLURM_MARKERS))


def _blocks(path: Path) -> Iterator[bytes]:
    """Read a log in blocks of whole lines. Within a very long line, each block repeats the end of the previous one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        rest = b""
        while data := file.read(BLOCK_BYTES):
            head, newline, tail = (rest + data).rpartition(b"\n")
            if len(tail) > LINE_BYTES:
                yield head + newline + tail
                rest = b"\0" + tail[-LINE_BYTES:]  # \0 keeps ^ from matching in the middle of a line
            else:
                yield head + newline
                rest = tail
        yield rest


def rank_ends(lines: list[str]) -> Iterator[RankEnd]:
    """The ranks that failed before srun, or the supervisor, ended the others, in the order of the reports."""
    for line in lines:
        if _SRUN_KILLS.match(line):
            return
        if match := _SRUN_END.match(line):
            for rank in hostlist.array_indices(match["tasks"].strip("[]")):
                yield RankEnd(node=match["node"], rank=rank, how=match["how"])
        elif match := _OWN_END.match(line):
            yield RankEnd(node=match["node"] or "", rank=int(match["rank"]), how=match["how"])
