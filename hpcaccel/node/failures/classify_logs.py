"""What the logs of an attempt say by themselves: last exceptions, telling lines, and how srun saw the ranks end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.slurm import hostlist

__all__ = [
    "LONGEST",
    "RankEnd",
    "RankLog",
    "rank_ends",
    "read_rank_logs",
    "read_slurm_lines",
    "read_tail",
    "slurm_spoke",
]

TAIL_BYTES = 64_000
BLOCK_BYTES = 1 << 20
LINE_BYTES = 4096
"""A line of Slurm's is shorter."""
LONGEST = 500
"""Characters of a line that are kept for the ledger."""

_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\w*)(?:: (.*))?$")
_ANY_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
"""Of any name: where it stands below the last, indented line of a traceback."""
_CHAIN = re.compile(r"^(?:The above exception was the direct cause of|During handling of the above exception, another)")
_SRUN_END = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)$")
_OF_SLURM = re.compile(
    rb"\*\*\* (?:STEP|JOB) .* CANCELLED AT |(?:^|(?<=\r))(?:srun: (?:error|Force)|slurmstepd)", re.MULTILINE
)
"""Lines of Slurm's own in the logs of a step that did not simply end."""
_WORDS_OF_SLURM = (b" CANCELLED AT ", b"srun: ", b"slurmstepd")
"""One of them is in each such line. Looked for first, which is many times faster."""
_SRUN_KILLS = re.compile(r"^srun: .*(?:Terminating StepId|Force Terminated|Job step aborted)")


@dataclass(frozen=True, kw_only=True)
class RankLog:
    rank: int
    exceptions: list[str]
    """``Type: message``: the last one first, then those that it was raised from or while handling."""
    lines: list[str]
    """The end of the log."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """srun's words about a rank that ended badly by itself, before srun ended the others."""

    node: str
    rank: int
    how: str


def read_rank_logs(run: RunDir, attempt: int) -> list[RankLog]:
    """In the order of ranks."""
    return [_read(log) for log in _rank_logs(run, attempt)]


def _rank_logs(run: RunDir, attempt: int) -> list[Path]:
    logs = [log for log in run.attempt(attempt).glob("*.log") if log.stem.isdigit()]
    return sorted(logs, key=lambda log: int(log.stem))


def _read(log: Path) -> RankLog:
    # torch puts the rank before each line of a traceback
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line)[:4000] for line in read_tail(log).splitlines()]
    return RankLog(rank=int(log.stem), exceptions=_exceptions(lines), lines=lines)


def read_tail(path: Path) -> str:
    """The end of a log."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _exceptions(lines: list[str]) -> list[str]:
    """The last traceback's exception, and those of the tracebacks above that lead to it."""
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
    """A message that ends with a colon goes on in indented lines; one of ours ends with what to do, in a line more."""
    if not first.endswith(":"):
        return first
    more = list(itertools.takewhile(lambda line: line.startswith(("  ", "\t")) and 'File "' not in line, below))
    if not more:
        return first
    last = below[len(more)].strip() if len(below) > len(more) and first.startswith("hpcaccel.") else ""
    return f"{first} {'; '.join(line.strip() for line in more)}" + (f". {last}" if last else "")


def read_slurm_lines(run: RunDir, attempt: int) -> list[str]:
    """What the batch step has printed since this attempt began: srun's and slurmd's own words are among it."""
    try:
        lines = read_tail(run.slurm_log).splitlines()
    except FileNotFoundError:
        return []
    begin = re.compile(rf"^hpcaccel: \S+ attempt {attempt}: ")
    starts = [number for number, line in enumerate(lines) if begin.match(line)]
    return lines[starts[-1] :] if starts else lines


def slurm_spoke(run: RunDir, attempt: int) -> bool:
    """Whether Slurm says anywhere in the logs of this attempt that it signalled or lost ranks."""
    if any(_OF_SLURM.search(block) for log in _rank_logs(run, attempt) for block in _with_slurms_words(log)):
        return True
    begin = re.compile(rb"^hpcaccel: \S+ attempt %d: " % attempt, re.MULTILINE)
    found = False
    for block in _blocks(run.slurm_log):
        starts = [match.end() for match in begin.finditer(block)]
        if starts:  # what stands before is an earlier attempt's
            found, block = False, block[starts[-1] :]
        found = found or _OF_SLURM.search(block) is not None
    return found


def _with_slurms_words(path: Path) -> Iterator[bytes]:
    return (block for block in _blocks(path) if any(word in block for word in _WORDS_OF_SLURM))


def _blocks(path: Path) -> Iterator[bytes]:
    """A log in pieces of whole lines; of a line that does not end, each piece repeats the end of the one before."""
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
                rest = b"\0" + tail[-LINE_BYTES:]  # so that no line seems to begin in its middle
            else:
                yield head + newline
                rest = tail
        yield rest


def rank_ends(lines: list[str]) -> Iterator[RankEnd]:
    """Which ranks ended badly by themselves, in the order in which srun saw them."""
    for line in lines:
        if _SRUN_KILLS.match(line):
            return
        if match := _SRUN_END.match(line):
            for rank in hostlist.array_indices(match["tasks"].strip("[]")):
                yield RankEnd(node=match["node"], rank=rank, how=match["how"])
