"""What a rank does and says: its phase, for the heartbeat to read, and the lines that rank 0 writes into the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Activity"]


class Activity:
    """One for each process.

    Args:
        is_main: whether this rank speaks for all.
    """

    def __init__(self, *, is_main: bool) -> None:
        self.phase = "starting"
        """As a ``records.Beat`` calls it."""
        self.left_at: str | None = None
        """``file:line`` where the script has left a loop of ours before its end; None where it trains on since."""
        self._is_main = is_main
        self._said: set[str] = set()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In ``phase`` inside, and then in the one before; an exception leaves it where it happened."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def say(self, text: str) -> None:
        """Tell the log, on rank 0."""
        if self._is_main:
            print(f"hpcaccel: {text}", flush=True)

    def say_once(self, text: str) -> None:
        """Tell the log, unless it was told already."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)
