"""Draws tables that fit the terminal: columns are shortened or left out in a given order; names are never cut.

Without a terminal (see ``has_a_terminal``), nothing is left out or wrapped. No line ends in blanks.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

__all__ = ["COLUMNS_THERE", "Cell", "Column", "Styled", "console_for", "has_a_terminal", "print_facts", "print_table"]

COLUMNS_THERE = "HPCACCEL_TERMINAL_COLUMNS"
"""Environment variable with the width of the user's terminal, for a command that is run over SSH. Not set if the output
does not go to a terminal."""

UNLIMITED = 1_000_000
GAP = "  "
_WORD = re.compile(r"\s*\S+|\s+$")


class Styled(NamedTuple):
    """A cell with a rich style, such as a colour."""

    text: str
    style: str


Cell = str | Styled
Line = list[Styled]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. Columns are shortened (``shortens``) and left out (``leaves``) in ascending order of these
    numbers until the table fits. None for ``shortens`` (``leaves``): the column is never shortened (left out)."""

    title: str
    right: bool = False
    wraps: int | None = None
    """Minimum width when cells are wrapped at blanks; None if each cell stays on one line."""
    leaves: int | None = None
    shortens: int | None = None
    """Position in that order at which the short forms of the column's cells replace the full ones."""
    short_title: str = ""


def has_a_terminal(stream: TextIO | None = None) -> bool:
    """Whether the output goes to a terminal, on this machine or, over SSH, on the user's machine."""
    return (sys.stdout if stream is None else stream).isatty() or _columns_there() is not None


def console_for(stream: TextIO | None) -> Console:
    stream = sys.stdout if stream is None else stream
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _columns_there() or UNLIMITED)


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell | tuple[Cell, Cell]]], *, console: Console
) -> list[str]:
    """Print ``rows`` under the columns' titles.

    Args:
        rows: each row has an entry for each column: a cell, or a pair of a cell and its short form.

    Returns:
        The titles of columns that were left out.
    """
    fitted = _Fitted(columns, list(rows))
    fitted.fit(console.width)
    _print(console, fitted.lines())
    return [column.title for column in columns if column not in fitted.columns]


def print_facts(facts: Iterable[tuple[str, Cell | Sequence[Cell]]], *, console: Console) -> None:
    """Print a line for each fact: its label in bold, and its value. If a value is a sequence, its cells are joined."""
    rows = [(label, [value] if isinstance(value, str | Styled) else list(value)) for label, value in facts]
    width = max((len(label) for label, _ in rows), default=0)
    lines: list[Line] = []
    for label, value in rows:
        parts = _wrapped([_styled(part) for part in value], console.width - width - len(GAP))
        for number, part in enumerate(parts):
            shown = label if number == 0 else ""
            lines.append([Styled(shown.ljust(width + len(GAP)), "bold"), *part])
    _print(console, lines)


class _Fitted:
    """A table whose columns are shortened or left out until it fits the terminal."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell | tuple[Cell, Cell]]]) -> None:
        self.columns = list(columns)
        self._titles = [column.title for column in columns]
        self._cells = [[_form(row[place], 0) for row in rows] for place in range(len(columns))]
        self._short = [[_form(row[place], 1) for row in rows] for place in range(len(columns))]
        self._widths = [self._natural(place) for place in range(len(columns))]

    def fit(self, width: int) -> None:
        """Use short forms and leave columns out, in order, until the table fits ``width`` or nothing more may be
        removed."""
        ways = [(column.shortens, column, True) for column in self.columns if column.shortens is not None]
        ways += [(column.leaves, column, False) for column in self.columns if column.leaves is not None]
        for _, column, shortens in sorted(ways, key=lambda way: way[0]):
            if self._least_width() <= width:
                break
            place = self.columns.index(column)
            if shortens:
                self._shorten(place)
            else:
                self._leave_out(place)
        self._share(width)

    def lines(self) -> Iterator[Line]:
        yield from self._row([Styled(title, "bold") for title in self._titles])
        for row in zip(*self._cells, strict=True):
            yield from self._row(row)

    def _row(self, row: Sequence[Styled]) -> list[Line]:
        parts = [
            [[cell]] if cell_len(cell.text) <= width else _wrapped([cell], width)
            for cell, width in zip(row, self._widths, strict=True)
        ]
        return [
            [self._padded(place, part[number] if number < len(part) else []) for place, part in enumerate(parts)]
            for number in range(max(map(len, parts), default=0))
        ]

    def _padded(self, place: int, line: Line) -> Styled:
        text, style = line[0] if line else Styled("", "")
        blanks = " " * (self._widths[place] - cell_len(text))
        gap = GAP if place else ""
        return Styled(f"{gap}{blanks}{text}" if self.columns[place].right else f"{gap}{text}{blanks}", style)

    def _natural(self, place: int) -> int:
        return max(cell_len(self._titles[place]), *(cell_len(cell.text) for cell in self._cells[place]), 0)

    def _least(self, place: int) -> int:
        wraps = self.columns[place].wraps
        return self._widths[place] if wraps is None else min(wraps, self._widths[place])

    def _least_width(self) -> int:
        count = len(self.columns)
        return sum(map(self._least, range(count))) + len(GAP) * max(0, count - 1)

    def _shorten(self, place: int) -> None:
        self._cells[place] = self._short[place]
        self._titles[place] = self.columns[place].short_title or self._titles[place]
        self._widths[place] = self._natural(place)

    def _leave_out(self, place: int) -> None:
        del self.columns[place], self._titles[place], self._cells[place], self._short[place], self._widths[place]

    def _share(self, width: int) -> None:
        """Divide the remaining width among the columns that may be wrapped, the narrowest first."""
        wrapping = [place for place, column in enumerate(self.columns) if column.wraps is not None]
        kept = sum(width for place, width in enumerate(self._widths) if place not in wrapping)
        left = width - kept - len(GAP) * max(0, len(self.columns) - 1)
        for done, place in enumerate(sorted(wrapping, key=lambda place: self._widths[place])):
            share = max(left // (len(wrapping) - done), self._least(place))
            self._widths[place] = min(self._widths[place], share)
            left -= self._widths[place]


def _form(cell: Cell | tuple[Cell, Cell], number: int) -> Styled:
    if isinstance(cell, tuple) and not isinstance(cell, Styled):
        cell = cell[number]
    return _styled(cell)


def _styled(cell: Cell) -> Styled:
    return cell if isinstance(cell, Styled) else Styled(cell, "")


def _wrapped(line: Line, width: int) -> list[Line]:
    """``line`` wrapped to ``width``. Words longer than ``width`` are not broken, so that a path can be copied."""
    lines: list[Line] = [[]]
    used = 0
    for text, style in line:
        for word in _WORD.findall(text):
            if used and used + cell_len(word.rstrip()) > width:
                lines.append([])
                used, word = 0, word.lstrip()
            lines[-1].append(Styled(word, style))
            used += cell_len(word)
    return [[Styled("".join(part.text for part in same), style)
             for style, same in itertools.groupby(part, key=lambda word: word.style)] for part in lines]  # fmt: skip


def _print(console: Console, lines: Iterable[Line]) -> None:
    if not console.is_terminal:
        console.file.writelines("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
        return
    segments = []
    for line in lines:
        blank = True
        parts: list[Segment] = []
        for text, style in reversed(line):
            shown = text.rstrip() if blank else text
            blank = blank and not shown
            parts.append(Segment(shown, console.get_style(style) if style else None))
        segments += [*reversed(parts), Segment.line()]
    console.print(Segments(segments), soft_wrap=True, end="")


def _columns_there() -> int | None:
    value = os.environ.get(COLUMNS_THERE, "")
    return int(value) if value.isdecimal() and int(value) else None
