"""Runs the checks of a rank, each with a time limit, and appends what they find to the rank's results as they go.

A rank that dies or hangs leaves a line that names the check it was in. Results are JSON lines in a file of the rank; if
the file cannot be written (a full disk), they go to the standard output, which the launcher stores as well.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.process_identity import node_name

__all__ = ["CheckFailed", "CheckRunner", "Fault", "ResultLog", "first_line", "last_lines", "rank_of_variables"]

T = TypeVar("T")
LONGEST = 600
"""Maximum length of a message, in characters."""


def first_line(error: BaseException) -> str:
    """An error as one line: its type, unless its message is for users, and the first line of its message."""
    from hpcaccel.errors import HpcaccelError

    text = (str(error).strip().splitlines() or [""])[0][:LONGEST]
    return text if isinstance(error, HpcaccelError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A problem that a check of this rank has found."""

    kind: str
    message: str
    severity: Literal["bad", "warning"] = "bad"
    ranks: Sequence[int] | None = None
    """The ranks at fault. None: this rank. Empty: unknown."""


class CheckFailed(Exception):
    """A check has found faults after which the checks that build on it are not possible."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


@dataclass
class ResultLog:
    """The results of this rank."""

    folder: Path
    rank: int | None = None
    node: str = field(default_factory=node_name)
    pid: int = field(default_factory=os.getpid)

    def write(self, check: str, state: str, **fields: Any) -> None:
        """Append one line: the state of a check (``began``, ``step``, ``ok``, ``failed``, ``timeout``, ``skipped``)."""
        line = {"selftest": 1, "rank": self.rank, "node": self.node, "pid": self.pid, "time": time.time()}
        line |= {"check": check, "state": state, **fields}
        name = f"rank-{'unknown' if self.rank is None else self.rank}.{self.node}.{self.pid}.jsonl"
        try:
            append_line(self.folder / name, line)
        except OSError:
            os.write(1, json.dumps(line).encode() + b"\n")

    def killed_ranks(self) -> set[int]:
        """The ranks whose process was killed, according to the results in the folder."""
        found = set()
        for path, line in last_lines(self.folder).items():
            rank = path.name.removeprefix("rank-").partition(".")[0]
            if rank.isdigit() and b'"state":"killed"' in line:
                found.add(int(rank))
        return found


def last_lines(folder: Path) -> dict[Path, bytes]:
    """The last line of each rank's results, without its first key."""
    return {path: path.read_bytes().rpartition(b'{"selftest"')[2] for path in folder.glob("rank-*.jsonl")}


def rank_of_variables() -> int | None:
    """This rank's number, even if the other variables are invalid."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or ""
    return int(text) if text.isdigit() else None


class CheckRunner:
    """Runs checks one after the other. Until a check is over, its faults and its data are only in memory; its steps are
    written at once."""

    def __init__(self, log: ResultLog) -> None:
        self.log = log
        self._check = ""
        self._faults: list[Fault] = []
        self._data: dict[str, Any] = {}

    def step(self, what: str) -> None:
        """Record what the current check does next."""
        self.log.write(self._check, "step", message=what)

    def report(self, fault: Fault) -> None:
        """Add a fault to the results of the current check, which continues."""
        self._faults.append(fault)

    def measure(self, **data: Any) -> None:
        """Add measurements to the results of the current check."""
        self._data |= data

    def skip(self, check: str, why: str) -> None:
        """Record that a check was left out."""
        self.log.write(check, "skipped", message=why)

    def local(self, check: str, function: Callable[[], T], *, seconds: float) -> T | None:
        """Run a check that involves no other rank. It runs in a thread, so that the next check can follow after
        ``seconds`` even if this one hangs in a system call. Returns None if the check failed."""
        self._begin(check)
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except Exception as error:
                errors.append(error)

        started = time.monotonic()
        thread = threading.Thread(target=work, name=f"selftest {check}", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._end("timeout", started, (Fault(kind="timeout", message=_late(check, seconds)),))
            return None
        self._end("failed" if errors else "ok", started, *(_faults_of(error) for error in errors))
        return results[0] if results else None

    def together(self, check: str, function: Callable[[], T], *, seconds: float) -> T | None:
        """Run a check that involves all ranks. If it is not over after ``seconds``, record that and end this process: a
        collective that waits for another rank cannot be left. Returns None if the check failed."""
        self._begin(check)
        started = time.monotonic()
        timer = threading.Timer(seconds, self._give_up, [check, seconds, started])
        timer.daemon = True
        timer.start()
        try:
            result = function()
        except Exception as error:
            timer.cancel()
            self._end("failed", started, _faults_of(error))
            return None
        timer.cancel()
        self._end("ok", started)
        return result

    def _give_up(self, check: str, seconds: float, started: float) -> None:
        # Without ranks at fault: the ranks that wait are as late as the rank that they wait for.
        self._end("timeout", started, (Fault(kind="timeout", message=_late(check, seconds), ranks=()),))
        os._exit(0)

    def _begin(self, check: str) -> None:
        self._check, self._faults, self._data = check, [], {}
        self.log.write(check, "began")

    def _end(self, state: str, started: float, *more: Sequence[Fault]) -> None:
        faults = [*self._faults, *(fault for some in more for fault in some)]
        own = [] if self.log.rank is None else [self.log.rank]
        lines: list[Mapping[str, Any]] = [
            {
                "kind": fault.kind,
                "message": fault.message[:LONGEST],
                "severity": fault.severity,
                "ranks": list(own if fault.ranks is None else fault.ranks),
            }
            for fault in faults
        ]
        seconds = round(time.monotonic() - started, 3)
        self.log.write(self._check, state, seconds=seconds, faults=lines, data=dict(self._data))


def _late(check: str, seconds: float) -> str:
    return f"the check {check!r} was not over after {seconds:.0f} s"


def _faults_of(error: BaseException) -> Sequence[Fault]:
    if isinstance(error, CheckFailed):
        return error.faults
    # Which rank is at fault is unknown: if a rank dies, the collectives of all other ranks fail.
    return (Fault(kind="error", message=first_line(error), ranks=()),)
