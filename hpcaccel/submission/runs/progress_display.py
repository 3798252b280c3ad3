"""Following a run: a display that shows its progress until it ends, in a terminal, a log or a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcaccel.core.formatting import clean
from hpcaccel.core.notebook import notebook_shell
from hpcaccel.submission.runs.notebook_display import NotebookDisplay
from hpcaccel.submission.runs.watch import Snapshot, Watcher, facts, news, state_line

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "display", "follow"]

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 5.0
CONFIRM_SECONDS = 15.0
"""Delay before a run that appears lost is checked again: file system and queue may be out of sync."""


class Display(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...


def follow(
    watcher: Watcher,
    display: Display,
    *,
    deadline: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Show a run until it has ended or is paused. Returns its last snapshot.

    Args:
        deadline: in monotonic seconds.

    Raises:
        TimeoutError: the run has not ended at the deadline; it continues.
    """
    looked_again = False
    while True:
        snapshot = watcher.look()
        display.show(snapshot)
        if deadline is not None and not snapshot.status.ended and time.monotonic() >= deadline:
            raise TimeoutError(f"run {watcher.run.run_id} has not ended in time; it continues")
        if not snapshot.status.ended:
            sleep(LOOK_SECONDS if deadline is None else max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        elif snapshot.status.state == "lost" and not looked_again:
            looked_again = True
            sleep(CONFIRM_SECONDS)
        else:
            return snapshot


@contextmanager
def display(*, stream: TextIO | None = None) -> Iterator[Display]:
    """Yield a display for ``stream`` (default: a notebook's cell, else stderr): a live display if it is a cell or a
    terminal, else plain lines."""
    shell = notebook_shell() if stream is None else None
    if shell is not None:
        with NotebookDisplay(shell) as cell:
            yield cell
        return
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield PlainDisplay(stream)
        return
    with LiveDisplay(stream) as live:
        yield live


class PlainDisplay:
    """Prints a line for each event, and every few seconds a line with the current step."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._before: Snapshot | None = None
        self._state = ""
        self._printed = float("-inf")
        self._step: int | None = None

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.status.ended:
            self._print_step(snapshot)  # before the line about the end
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


BAR_WIDTH = 28
LEAST_BAR_WIDTH = 8


class LiveDisplay:
    """Shows a progress bar at the bottom of the terminal, and prints a line for each event above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._before: Snapshot | None = None

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        for line in news(self._before, snapshot):
            self._console.print(Text(line, style="dim"))
        self._before = snapshot
        self._live.update(_picture(snapshot, self._console.width))


def _picture(snapshot: Snapshot, columns: int) -> Group:
    attempt = f" · attempt {snapshot.attempt}" if snapshot.attempt else ""
    head = Text.assemble((clean(snapshot.status.name), "bold"), attempt, " · ", state_line(snapshot))
    row = Table.grid(padding=(0, 2))
    shown = _that_fit(facts(snapshot), columns)
    bar = _bar(snapshot, columns - sum(len(fact) + 2 for fact in shown))
    texts = [Text(fact) for fact in shown]
    row.add_row(*([bar, *texts] if bar is not None else texts))
    return Group(head, row)


def _that_fit(found: list[str], columns: int) -> list[str]:
    """The first facts that fit the terminal without being cut."""
    while len(found) > 1 and sum(len(fact) + 2 for fact in found) > columns:
        found = found[:-1]
    return found


def _bar(snapshot: Snapshot, room: int) -> ProgressBar | None:
    if not snapshot.total_steps or room < LEAST_BAR_WIDTH:
        return None
    return ProgressBar(total=snapshot.total_steps, completed=snapshot.step or 0, width=min(BAR_WIDTH, room))
