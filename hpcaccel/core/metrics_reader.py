"""Reader of a run's metrics: lines that rank 0 logged through hpcaccel, and lines of ``$HPCACCEL_METRICS``.

Programs in any language append one JSON object per line to ``$HPCACCEL_METRICS``: ``{"step": 3, "loss": 0.5}``. A line
without a step gets the largest earlier step plus 1. ``time`` is in seconds since the epoch. Non-numeric values, and
lines without any number, are skipped. Files are read incrementally and may contain arbitrary bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpcaccel.core.run_dir import RunDir

__all__ = ["Line", "Logged"]

OUR_LIMIT = 16 << 20
"""Maximum length in bytes of a line that rank 0 logged. Longer lines are skipped."""
THEIR_LIMIT = 64 << 10
"""Maximum length in bytes of a line of ``$HPCACCEL_METRICS``. Longer lines are skipped."""
DECODED_TOGETHER = 200
"""Number of lines of rank 0 that are decoded together, which takes half as long as one by one."""
MOST_NAMES = 1000
"""Maximum number of metrics for which an example of a non-numeric value is kept."""


class Line(NamedTuple):
    """The values of one step."""

    step: int
    attempt: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    counted: bool = False
    """Whether the line had no step, so that ``step`` is one more than the largest earlier step in the file."""


class Logged:
    """The metrics of ``run``, read incrementally. The constructor opens no file."""

    def __init__(self, run: RunDir) -> None:
        self.passed_over = 0
        """Number of skipped lines of ``$HPCACCEL_METRICS``."""
        self.no_numbers: dict[str, str] = {}
        """An example value for each metric that was logged with a non-numeric value."""
        self._run = run
        self._first = ""
        self._ours = _Tail(run.metrics, limit=OUR_LIMIT)
        self._theirs: dict[int, _Theirs] = {}
        self._over = 0

    def read(self) -> list[Line]:
        """Lines added since the last call, older attempts first."""
        return list(self.lines())

    def lines(self) -> Iterator[Line]:
        """Like :meth:`read`, but without holding all lines in memory, if the run has no ``$HPCACCEL_METRICS``."""
        attempts = [number for number in self._attempts() if self._run.foreign_metrics(number).exists()]
        if not attempts:
            yield from self._read_ours()
            return
        lines = list(self._read_ours())
        lines += [line for attempt in attempts for line in self._read_theirs(attempt)]
        yield from sorted(lines, key=lambda line: line.attempt)

    def _read_ours(self) -> Iterator[Line]:
        raws = (raw for _, raw, _ in self._ours.read() if raw is not None)
        while some := list(itertools.islice(raws, DECODED_TOGETHER)):
            for value in _parse_all(some):
                if (line := self._our_line(value)) is not None:
                    yield line

    @property
    def warning(self) -> str:
        """Message about skipped lines, with the error of the first one; empty if there are none."""
        if not self.passed_over:
            return ""
        if self.passed_over == 1:
            return f"1 line was skipped: {self._first}"
        return f"{self.passed_over} lines were skipped; the first one: {self._first}"

    def _attempts(self) -> list[int]:
        """Attempts whose file may have grown. A file is read one last time after the next attempt has begun."""
        try:
            found = sorted(int(name) for name in os.listdir(self._run.attempts) if name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []
        wanted = [number for number in found if number > self._over]
        self._over = max([self._over, *wanted[:-1]])
        return wanted

    def _our_line(self, line: Mapping[str, Any]) -> Line | None:
        """The values of an object that rank 0 logged; None if it is of another kind."""
        step, attempt, time, values = line.get("step"), line.get("attempt"), line.get("time"), line.get("values")
        if not (isinstance(step, int) and isinstance(attempt, int) and isinstance(time, _NUMBER)):
            return None
        numbers = _numbers(values if isinstance(values, dict) else {}, self._remember)
        return Line(step, attempt, float(time), numbers)

    def _read_theirs(self, attempt: int) -> Iterator[Line]:
        theirs = self._theirs.setdefault(attempt, _Theirs(_Tail(self._run.foreign_metrics(attempt), limit=THEIR_LIMIT)))
        for number, raw, changed in theirs.tail.read(unfinished=_is_object):
            try:
                if raw is None:
                    raise ValueError(f"line longer than {THEIR_LIMIT >> 10} KiB")
                if raw.strip():
                    yield self._their_line(raw, attempt, theirs, changed)
            except ValueError as problem:
                self.passed_over += 1
                self._first = self._first or f"line {number} of {theirs.tail.path}: {problem}"

    def _their_line(self, raw: bytes, attempt: int, theirs: _Theirs, changed: float) -> Line:
        """Parse one line of ``$HPCACCEL_METRICS``.

        Args:
            changed: time of the file's last change, in seconds since the epoch; used if the line has no ``time``.

        Raises:
            ValueError: the line is not valid, or contains no number.
        """
        line = _parse(raw)
        step = theirs.last_step + 1 if line.get("step") is None else _step(line["step"])
        inner = line.get("values")
        given = inner if isinstance(inner, dict) else {k: v for k, v in line.items() if k not in _KEYS}
        values = _numbers(given, self._remember)
        if not values:
            raise ValueError(f"no metric is a number: {_short(given)}")
        theirs.last_step = max(step, theirs.last_step)
        when = _number(line.get("time"))
        if when is None or not math.isfinite(when):
            when = changed
        return Line(step=step, attempt=attempt, time=when, values=values, counted=line.get("step") is None)

    def _remember(self, name: str, value: Any) -> None:
        if len(self.no_numbers) < MOST_NAMES:
            self.no_numbers.setdefault(name, _short(value))


_NUMBER = (int, float)
_KEYS = ("step", "time", "attempt")
"""Keys of a line of ``$HPCACCEL_METRICS`` that are not metrics."""


@dataclass
class _Theirs:
    """Reader state for one attempt's ``$HPCACCEL_METRICS``."""

    tail: _Tail
    last_step: int = 0


class _Tail:
    """Reads the complete lines of a growing file; starts over if the file has been truncated."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self.path = path
        self._limit = limit
        self._offset = 0
        self._number = 0
        self._skipping = False

    def read(
        self, *, unfinished: Callable[[bytes], bool] = lambda raw: False
    ) -> Iterator[tuple[int, bytes | None, float]]:
        """Yields a tuple for each new line: its number, its bytes (None if longer than the limit), and the time of the
        file's last change.

        Args:
            unfinished: called with a last line that has no newline; returns whether the line is complete all the same.
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
    """Whether a line without a newline is a complete JSON object. A truncated object does not parse."""
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
        raise ValueError(f"not a JSON object: {_short(value)}")
    return value


def _parse_all(raws: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON objects in ``raws``. Lines that are not an object are left out."""
    try:
        found = json.loads(b"[" + b",".join(raws) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(raws):  # one of the lines is damaged
        found = [value for raw in raws if (value := _parsed(raw)) is not None]
    return [value for value in found if isinstance(value, dict)]


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return _parse(raw)
    except ValueError:
        return None


def _numbers(values: Mapping[str, Any], other: Callable[[str, Any], None]) -> dict[str, float]:
    """The entries of ``values`` that are numbers; ``other`` is called with name and value of each other entry."""
    found = {}
    for name, value in values.items():
        if not name.isascii():  # JSON allows half a surrogate pair, which cannot be encoded
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
        raise ValueError(f"step is {_short(value)}; it must be an integer, 0 or more")
    return int(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
