"""Trials of a worker's that somebody else still writes: who was taken for dead, or takes a while to die."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Busy"]

BUSY_SECONDS = 20.0
"""After so long such a trial is looked at again."""
MOST_SECONDS = 600.0
"""So long a worker that has nothing else to do waits for them."""


class Busy:
    """Args:
    is_wanted: whether a trial is still this worker's to run.
    """

    def __init__(self, is_wanted: Callable[[int], bool]) -> None:
        self._is_wanted = is_wanted
        self._at: dict[int, float] = {}
        self._since = time.monotonic()

    def add(self, number: int) -> None:
        self._at[number] = time.monotonic() + BUSY_SECONDS

    def something_was_done(self) -> None:
        """Another trial has ended here."""
        self._since = time.monotonic()

    def not_yet(self) -> set[int]:
        """Those that are to be left alone for now."""
        for number in [number for number in self._at if not self._is_wanted(number)]:
            del self._at[number]
        return {number for number, at in self._at.items() if at > time.monotonic()}

    def look_again_at(self, latest: float) -> float:
        """When to look again, ``latest`` at the latest (seconds of the monotonic clock)."""
        return min([latest, *self._at.values()])

    def is_worth_waiting(self) -> bool:
        self.not_yet()
        return bool(self._at) and time.monotonic() - self._since < MOST_SECONDS

    def __bool__(self) -> bool:
        return bool(self._at)
