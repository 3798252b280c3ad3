"""What a run's program has logged: what rank 0 wrote through hpcaccel, and what programs in any language appended to
``$HPCACCEL_METRICS``. Read a little at a time, and whatever strangers write.

The second kind is one JSON object a line, ``{"step": 3, "loss": 0.5}``. Without a step lines are numbered from 1 on. A
``time`` is in seconds since the epoch. What is no number is passed over, and so are whole lines that hold none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpcaccel.core.run_dir import RunDir

__all__ = ["Line", "Logged"]

OUR_LIMIT = 16 << 20
THEIR_LIMIT = 64 << 10
"""Bytes of the longest line that is read."""
MOST_NAMES = 1000
"""So many names of values that are no numbers are remembered."""


class Line(NamedTuple):
    """What was logged at once."""

    step: int
    attempt: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    counted: bool = False
    """The line named no step: it was numbered."""


class Logged:
    """Everything that was logged in ``run``. Building one touches no file; each ``read`` gives what is new."""

    def __init__(self, run: RunDir) -> None:
        self.passed_over = 0
        """How many lines of ``$HPCACCEL_METRICS`` were of no use."""
        self.no_numbers: dict[str, str] = {}
        """Names that were given something else than a number, with an example."""
        self._run = run
        self._first = ""
        self._ours = _Tail(run.metrics, limit=OUR_LIMIT)
        self._theirs: dict[int, _Theirs] = {}
        self._over = 0

    def read(self) -> list[Line]:
        """The lines that were added since the last call, older attempts before newer ones."""
        ours = (self._our_line(raw) for _, raw, _ in self._ours.read() if raw is not None)
        lines = [line for line in ours if line is not None]
        theirs = [line for attempt in self._attempts() for line in self._read_theirs(attempt)]
        return sorted(lines + theirs, key=lambda line: line.attempt) if theirs else lines

    @property
    def warning(self) -> str:
        """Which lines were passed over and why, for people; empty where all were good."""
        if not self.passed_over:
            return ""
        many = "1 line was" if self.passed_over == 1 else f"{self.passed_over} lines were"
        return f"{many} passed over; {'it is' if self.passed_over == 1 else 'the first is'} {self._first}"

    def _attempts(self) -> list[int]:
        """Attempts whose own file may have grown: a file is looked at once more when the next attempt has begun."""
        try:
            found = sorted(int(name) for name in os.listdir(self._run.attempts) if name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []
        wanted = [number for number in found if number > self._over]
        self._over = max([self._over, *wanted[:-1]])
        return wanted

    def _our_line(self, raw: bytes) -> Line | None:
        """None where a line was torn, or one of another kind got into the file."""
        try:
            line = _parse(raw)
        except ValueError:
            return None
        step, attempt, time, values = line.get("step"), line.get("attempt"), line.get("time"), line.get("values")
        if not (isinstance(step, int) and isinstance(attempt, int) and isinstance(time, int | float)):
            return None
        numbers = _numbers(values if isinstance(values, dict) else {}, self._remember)
        return Line(step=step, attempt=attempt, time=float(time), values=numbers)

    def _read_theirs(self, attempt: int) -> Iterator[Line]:
        theirs = self._theirs.setdefault(attempt, _Theirs(_Tail(self._run.foreign_metrics(attempt), limit=THEIR_LIMIT)))
        for number, raw, changed in theirs.tail.read(unfinished=_is_object):
            try:
                if raw is None:
                    raise ValueError(f"longer than {THEIR_LIMIT >> 10} kB")
                if raw.strip():
                    yield self._their_line(raw, attempt, theirs, changed)
            except ValueError as problem:
                self.passed_over += 1
                self._first = self._first or f"line {number} of {theirs.tail.path}: {problem}"

    def _their_line(self, raw: bytes, attempt: int, theirs: _Theirs, changed: float) -> Line:
        """One line of theirs; ValueError says what is wrong with it."""
        line = _parse(raw)
        step = theirs.last_step + 1 if line.get("step") is None else _step(line["step"])
        inner = line.get("values")
        given = inner if isinstance(inner, dict) else {k: v for k, v in line.items() if k not in _KEYS}
        values = _numbers(given, self._remember)
        if not values:
            raise ValueError("no number in it")
        theirs.last_step = max(step, theirs.last_step)
        when = _number(line.get("time"))
        if when is None or not math.isfinite(when):
            when = changed
        return Line(step=step, attempt=attempt, time=when, values=values, counted=line.get("step") is None)

    def _remember(self, name: str, value: Any) -> None:
        if len(self.no_numbers) < MOST_NAMES:
            self.no_numbers.setdefault(name, _short(value))


_KEYS = ("step", "time", "attempt")


@dataclass
class _Theirs:
    """One attempt's file, and how far its own count has come."""

    tail: _Tail
    last_step: int = 0


class _Tail:
    """The whole lines of a file that grows; of one that was begun anew, from its beginning."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self.path = path
        self._limit = limit
        self._offset = 0
        self._number = 0
        self._skipping = False

    def read(
        self, *, unfinished: Callable[[bytes], bool] = lambda raw: False
    ) -> Iterator[tuple[int, bytes | None, float]]:
        """What was added: number, bytes (None: longer than the limit), and when the file last changed.

        Args:
            unfinished: whether a last line without an end counts as well.
        """
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            facts = os.fstat(file.fileno())
            if facts.st_size < self._offset:
                self._offset = self._number = 0
                self._skipping = False
            file.seek(self._offset)
            for raw in self._lines(file, unfinished):
                yield self._number, raw, facts.st_mtime

    def _lines(self, file: BinaryIO, unfinished: Callable[[bytes], bool]) -> Iterator[bytes | None]:
        while raw := file.readline(self._limit):
            whole = raw.endswith(b"\n")
            too_long = not whole and len(raw) == self._limit
            if not (whole or too_long or (not self._skipping and unfinished(raw))):
                return
            self._offset += len(raw)
            if self._skipping:
                self._skipping = not whole
                continue
            self._number += 1
            self._skipping = too_long
            yield None if too_long else raw


def _is_object(raw: bytes) -> bool:
    """Half an object is never JSON: whoever forgets the newline has still written a line."""
    try:
        return bool(_parse(raw))
    except ValueError:
        return False


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {_short(raw[:80].decode(errors='replace').strip())}") from None
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object: {_short(value)}")
    return value


def _numbers(values: Mapping[str, Any], other: Callable[[str, Any], None]) -> dict[str, float]:
    """The numbers among ``values``; the others are told to ``other``."""
    found = {}
    for name, value in values.items():
        if not name.isascii():  # half a surrogate pair is a text to JSON, and to nobody else
            name = name.encode(errors="backslashreplace").decode()
        number = value if type(value) is float else _number(value)
        if number is None:
            other(name, value)
        else:
            found[name] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _step(value: Any) -> int:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not 0 <= value < 1 << 63:
        raise ValueError(f"step is {_short(value)}, and must be a whole number, 0 or more")
    return int(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
