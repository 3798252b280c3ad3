"""The live display of one run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from hpcaccel.view.events import facts, news, state_line
from hpcaccel.view.watch import Snapshot, Watcher

__all__ = ["Display", "PlainDisplay", "display", "follow"]

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 5.0
SURE_SECONDS = 15.0
"""A run that looks lost is looked at again so much later: file systems and queues may lag behind each other."""


class Display(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...


def follow(watcher: Watcher, display: Display, *, sleep: Callable[[float], None] = time.sleep) -> Snapshot:
    """Show a run until it has ended (or is paused), and return what is known then."""
    looked_again = False
    while True:
        snapshot = watcher.look()
        display.show(snapshot)
        if not snapshot.status.ended:
            sleep(LOOK_SECONDS)
        elif snapshot.status.state == "lost" and not looked_again:
            looked_again = True
            sleep(SURE_SECONDS)
        else:
            return snapshot


@contextmanager
def display(*, stream: TextIO | None = None) -> Iterator[Display]:
    """A live display where ``stream`` (stderr) is a terminal, plain lines where it is not."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield PlainDisplay(stream)
        return
    from hpcaccel.view.live_display import LiveDisplay

    with LiveDisplay(stream) as live:
        yield live


class PlainDisplay:
    """A line when something happens, and every few seconds a line with the step that was reached."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._before: Snapshot | None = None
        self._state = ""
        self._printed = float("-inf")
        self._step: int | None = None

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.status.ended:
            self._print_step(snapshot)  # before the words about the end
        for line in news(self._before, snapshot):
            self._print(line)
        self._before = snapshot
        state = state_line(snapshot)
        if state != self._state and snapshot.status.state != "running":
            self._print(state)
        self._state = state
        if self._clock() - self._printed >= PLAIN_SECONDS:
            self._print_step(snapshot)

    def _print_step(self, snapshot: Snapshot) -> None:
        if snapshot.step is not None and snapshot.step != self._step:
            self._print("  ".join(facts(snapshot)))
            self._printed, self._step = self._clock(), snapshot.step

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
