"""What pip is doing, from what it prints."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["PipOutput", "Tell", "is_progress"]

Tell = Callable[[str, int | None], None]
"""Hears what pip does at this moment, in its own words; with a number: it is done with so many percent of that."""

_DOING = re.compile(r"(?:Processing|Collecting|Downloading|Using cached|Building|Installing) .+")
_NOT_NEWS = re.compile(r".*(?:\.metadata(?: \(.*\))?|: finished with status '.*')")
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
"""As ``--progress-bar raw`` tells it."""


def is_progress(line: str) -> bool:
    return _BYTES.fullmatch(line.strip()) is not None


class PipOutput:
    """Takes the output as it comes, in pieces that may end anywhere."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._rest = b""
        self._doing = ""

    def hear(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line.decode("utf-8", "replace").strip())

    def _line(self, line: str) -> None:
        if (match := _BYTES.fullmatch(line)) is not None:
            done, total = int(match[1]), int(match[2])
            if self._doing and total:
                self._tell(self._doing, 100 * done // total)
        elif _DOING.fullmatch(line):
            self._doing = "" if _NOT_NEWS.fullmatch(line) else line
            if self._doing:
                self._tell(line, None)
