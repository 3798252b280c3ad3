"""Log files of a run, and ranges of one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.errors import RunNotFound

__all__ = ["MOST_BYTES", "PART_BYTES", "LogPart", "log_files", "log_path", "read_part"]

MOST_BYTES = 512 << 10
"""Largest range of one answer."""
PART_BYTES = 64 << 10
"""Bytes that a stream reads at a time: as much as one slow client keeps in memory."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.log")


@dataclass(frozen=True)
class LogPart:
    """A range of a log file. Bytes that are not UTF-8 are replaced."""

    name: str
    text: str
    offset: int
    """Where the range begins, in bytes."""
    next_offset: int
    """Where the next range begins."""
    size: int
    """Size of the file when it was read."""


def log_files(run: RunDir) -> dict[str, Path]:
    """The log files of a run by name. Links are left out: a rank could link to any file."""
    found = {run.slurm_log.name: run.slurm_log}
    for attempt in numbered_folders(run.attempts):
        folder = run.attempt(attempt)
        names = sorted((entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)), key=_order)
        found |= {f"{attempt}/{name}": folder / name for name in names}
    return {name: path for name, path in found.items() if path.is_file() and not path.is_symlink()}


def _order(name: str) -> tuple[bool, int, str]:
    stem = name.removesuffix(".log")
    return (not stem.isdecimal(), int(stem) if stem.isdecimal() else 0, name)


def log_path(run: RunDir, name: str) -> Path:
    """The path of a log.

    Raises:
        RunNotFound: the run has no log of this name.
    """
    path = log_files(run).get(name)
    if path is None:
        raise RunNotFound(f"run {run.run_id} has no log {name[:80]!r}")
    return path


def read_part(path: Path, name: str, offset: int, limit: int) -> LogPart:
    """Read at most ``limit`` bytes. A character that is cut at the end is left for the next range."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = min(offset, size) if offset >= 0 else max(0, size + offset)
        file.seek(begin)
        data = file.read(limit)
    cut = _unfinished(data) if begin + len(data) < size or len(data) == limit else 0
    data = data[: len(data) - cut] if cut < len(data) else data
    return LogPart(name, data.decode(errors="replace"), begin, begin + len(data), size)


def _unfinished(data: bytes) -> int:
    """Number of bytes at the end of ``data`` that begin a UTF-8 character without completing it."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:
            return length if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0
