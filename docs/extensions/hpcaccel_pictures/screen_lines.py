"""The lines of a recorded terminal session, each with the time for which it was on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import pyte

from hpcaccel_pictures.recording import OUTPUT, Recording

__all__ = ["Line", "Run", "screen_lines"]

MOST_LINES = 300
"""Lines of the emulated terminal: so many that the session never scrolls, and a line keeps its place."""


class Run(NamedTuple):
    """Characters of a line that look the same."""

    column: int
    text: str
    colour: str
    """``default``, a name such as ``green``, or six hexadecimal digits."""
    bold: bool
    reverse: bool


@dataclass(frozen=True)
class Line:
    """One state of a line of the screen."""

    row: int
    runs: tuple[Run, ...]
    start: float
    end: float | None
    """None: until the end of the session."""


def screen_lines(recording: Recording, times: list[float]) -> Iterator[Line]:
    """All states of all lines.

    Args:
        times: when each event of the recording is shown, in seconds. Of events at the same time, only the state
            after the last one is shown.
    """
    screen = pyte.Screen(recording.columns, MOST_LINES)
    stream = pyte.Stream(screen)
    shown: dict[int, tuple[tuple[Run, ...], float]] = {}
    cursor_row = 0
    for time, group in groupby(zip(times, recording.events, strict=True), key=lambda pair: pair[0]):
        for _, (_, kind, text) in group:
            if kind == OUTPUT:
                stream.feed(text.replace("\x1b[2m", "\x1b[90m"))  # pyte has no faint text: grey
        changed = {*screen.dirty, cursor_row, screen.cursor.y}
        cursor_row = screen.cursor.y
        screen.dirty.clear()
        for row in sorted(changed):
            runs = tuple(_runs(screen, row))
            old, since = shown.get(row, ((), 0.0))
            if runs == old:
                continue
            if old:
                yield Line(row, old, since, time)
            shown[row] = (runs, time)
    for row, (runs, since) in sorted(shown.items()):
        if runs:
            yield Line(row, runs, since, None)


def _runs(screen: pyte.Screen, row: int) -> Iterator[Run]:
    cells = screen.buffer[row]
    has_cursor = not screen.cursor.hidden and screen.cursor.y == row

    def look(column: int) -> tuple[str, bool, bool]:
        cell = cells[column]
        return cell.fg, cell.bold, cell.reverse != (has_cursor and column == screen.cursor.x)

    for (colour, bold, reverse), columns in groupby(range(screen.columns), key=look):
        found = list(columns)
        text = "".join(cells[column].data for column in found)
        if not reverse:
            text = text.rstrip()
        if text:
            yield Run(found[0], text, colour, bold, reverse)
