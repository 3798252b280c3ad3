"""What an attempt's exit code and logs say about how it failed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from hpcaccel.rundir import RunDir

__all__ = ["classify"]

TAIL_BYTES = 64_000

_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\w*)(?:: (.*))?$")
_ANY_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
"""Of any name: where it stands below the last, indented line of a traceback."""
_ECHO = re.compile(
    r"\bRankFailed\b|gloo|nccl|Connection (?:closed|reset|refused)|Broken pipe|by peer|DistBackend|ProcessGroup", re.I
)


def classify(run: RunDir, *, attempt: int, exit_code: int) -> tuple[str, str]:
    """The class of a failure and one sentence about it.

    Classes: ``user_mistake`` (exit code 2), ``out_of_memory``, ``import_error``, ``exception``, ``killed`` (by a
    signal), ``exit`` (any other code).
    """
    rank, found = _first_cause(run.attempt(attempt))
    if exit_code == 2:
        return "user_mistake", f"rank {rank}: {found}" if found else "the program ended with code 2, a user's mistake"
    if found:
        name = found.partition(":")[0].rpartition(".")[2]
        if "OutOfMemory" in name or name == "MemoryError":
            kind = "out_of_memory"
        elif name in ("ImportError", "ModuleNotFoundError"):
            kind = "import_error"
        else:
            kind = "exception"
        return kind, f"rank {rank}: {found}"
    if exit_code > 128:
        return "killed", f"a rank was killed by {_signal_name(exit_code - 128)}"
    return "exit", f"the program ended with code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_cause(folder: Path) -> tuple[str, str | None]:
    """The rank and the exception that came first in meaning: one rank's error makes the others lose their peer."""
    echo: tuple[str, str | None] = ("?", None)
    for log in sorted(folder.glob("*.log")):
        if not log.stem.isdigit():
            continue
        line = _last_exception(log)
        if line and not _ECHO.search(line):
            return log.stem, line
        if line and echo[1] is None:
            echo = (log.stem, line)
    return echo


def _last_exception(log: Path) -> str | None:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    if "Traceback (most recent call last)" not in text:
        return None
    # torch puts the rank before each line of a traceback
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    matches = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if _EXCEPTION.match(line) or (above.startswith("    ") and _ANY_EXCEPTION.match(line))
    ]
    return matches[-1].strip()[:500] if matches else None
