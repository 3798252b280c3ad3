"""A spec that comes through a pipe: ``-`` is standard input, ``<(…)`` a FIFO. It can be read only once, and the
directory that its relative paths start from is the current one."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from hpcaccel.core.progress_notes import told_when_slow

__all__ = ["base_of", "is_pipe", "read_pipe"]

STDIN = "-"
_read: dict[str, bytes] = {}


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether it is standard input, or neither a file nor a directory."""
    if os.fspath(path) == STDIN:
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def base_of(path: str | os.PathLike[str]) -> Path:
    """The directory that relative paths in the spec at ``path`` start from; absolute."""
    return Path.cwd() if is_pipe(path) else Path(path).absolute().parent


def read_pipe(path: Path, most: int) -> bytes:
    """What comes through it, up to ``most`` bytes and one more; the same again for who asks again.

    Raises:
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    if name not in _read:
        what = "standard input" if name == STDIN else f"{name}, a pipe"
        with told_when_slow(f"waiting for a spec from {what}: Ctrl-C gives up"):
            _read[name] = sys.stdin.buffer.read(most + 1) if name == STDIN else _bytes(path, most + 1)
    return _read[name]


def _bytes(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)
