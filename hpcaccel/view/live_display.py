"""The live display on a terminal: the bar stays at the bottom, what happens scrolls by above it."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcaccel.view.events import facts, news, state_line
from hpcaccel.view.formatting import clean
from hpcaccel.view.watch import Snapshot

__all__ = ["LiveDisplay"]

BAR_WIDTH = 28
LEAST_BAR_WIDTH = 8


class LiveDisplay:
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
    said = _that_fit(facts(snapshot), columns)
    bar = _bar(snapshot, columns - sum(len(fact) + 2 for fact in said))
    texts = [Text(fact) for fact in said]
    row.add_row(*([bar, *texts] if bar is not None else texts))
    return Group(head, row)


def _that_fit(said: list[str], columns: int) -> list[str]:
    """As many of the facts, from the first, as the terminal has room for: none of them is cut."""
    while len(said) > 1 and sum(len(fact) + 2 for fact in said) > columns:
        said = said[:-1]
    return said


def _bar(snapshot: Snapshot, room: int) -> ProgressBar | None:
    if not snapshot.total_steps or room < LEAST_BAR_WIDTH:
        return None
    return ProgressBar(total=snapshot.total_steps, completed=snapshot.step or 0, width=min(BAR_WIDTH, room))
