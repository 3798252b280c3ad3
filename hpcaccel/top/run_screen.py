"""One run or sweep: its overview, its log as it grows, and its batch script."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, RichLog, Static

from hpcaccel.core.formatting import clean
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.top.confirm_screen import ACTION_KEYS
from hpcaccel.top.log_tail import LogTail, shown_line
from hpcaccel.top.run_lines import run_lines, sweep_lines
from hpcaccel.top.watched_runs import Action, Watched
from hpcaccel.view.run_overview import RunRow

if TYPE_CHECKING:
    from hpcaccel.top.top_app import TopApp

__all__ = ["RunScreen"]

MOST_LINES = 5000
"""Number of lines of a log that the screen keeps."""


class RunScreen(Screen[None]):
    """One run, updated while the screen is open.

    Args:
        row: the run's row in the list.
        is_sweep: whether it is a sweep, which has no log of its own.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,left", "leave", "Runs"),
        Binding("o", "show('overview')", "Info"),
        Binding("l", "show('log')", "Log"),
        Binding("b", "show('script')", "Script"),
        Binding("n", "next_source", "Next log", show=False),
        *ACTION_KEYS,
    ]

    app: TopApp

    def __init__(self, row: RunRow, *, is_sweep: bool) -> None:
        super().__init__()
        self._row = row
        self._is_sweep = is_sweep
        self._watched: Watched | None = None
        self._shown = Text()
        self._tail = LogTail(RunDir(row.path))

    def compose(self) -> ComposeResult:
        yield Static(self._title(), id="title")
        with ContentSwitcher(initial="overview"):
            with VerticalScroll(id="overview"):
                yield Static(Text("reading …", style="dim"), id="facts")
            yield RichLog(id="log", max_lines=MOST_LINES, wrap=True, highlight=False, markup=False, auto_scroll=False)
            with VerticalScroll(id="script"):
                yield Static(Text("reading …", style="dim"), id="text")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.read_overview()
        self.set_interval(self.app.seconds, self.read_overview)
        self.set_interval(self.app.log_seconds, self._read_log_if_shown)
        self.query_one("#overview").focus()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    # -- what is shown ----------------------------------------------------------------------------------------------

    def _title(self) -> Text:
        title = Text(clean(self._row.name), style="bold").append(f"  {self._row.run_id}", "not bold dim")
        if self.is_mounted and self.query_one(ContentSwitcher).current == "log":
            title.append(f"   log of {self._tail.source} (n: next)", "not bold")
        return title

    def action_leave(self) -> None:
        self.app.pop_screen()

    def action_show(self, part: str) -> None:
        if self._is_sweep and part == "log":
            self.notify(f"A sweep has no log of its own: open a trial, such as {self._row.run_id}_0")
            return
        self.query_one(ContentSwitcher).current = part
        self.query_one(f"#{part}").focus()
        self.query_one("#title", Static).update(self._title())
        if part == "log":
            self.read_log()
        elif part == "script":
            self.read_script()

    def action_next_source(self) -> None:
        found = None if self._watched is None else self._watched.traceback
        sources = LogTail.sources(None if found is None else found[0])
        place = sources.index(self._tail.source) + 1 if self._tail.source in sources else 0
        self._tail = LogTail(RunDir(self._row.path), sources[place % len(sources)])
        self.query_one("#log", RichLog).clear()
        self.action_show("log")

    def action_act(self, action: Action) -> None:
        self.app.ask(self._row, action, then=self.read_overview)

    # -- reading, in threads ----------------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="overview", exit_on_error=False)
    def read_overview(self) -> None:
        try:
            found = self.app.runs.look(self._row.path, is_sweep=self._is_sweep)
        except (HpcaccelError, OSError) as error:
            self.app.call_from_thread(self.app.show_problem, error)
            return
        self.app.call_from_thread(self._take, found)

    def _take(self, found: Watched) -> None:
        self._watched = found
        self._draw()

    def _draw(self) -> None:
        """Show the overview, if it differs from what is shown."""
        if self._watched is None or not self.is_mounted:
            return
        width = max(40, self.size.width - 2)
        if self._watched.run is not None:
            text = run_lines(self._watched.run, width=width, traceback=self._watched.traceback)
        else:
            assert self._watched.sweep is not None
            text = sweep_lines(self._watched.sweep, width=width)
        if text != self._shown:
            self._shown = text
            self.query_one("#facts", Static).update(text)

    def _read_log_if_shown(self) -> None:
        if self.query_one(ContentSwitcher).current == "log":
            self.read_log()

    @work(thread=True, exclusive=True, group="log", exit_on_error=False)
    def read_log(self) -> None:
        tail = self._tail
        try:
            replaced, lines = tail.new()
        except OSError as error:
            self.app.call_from_thread(self.app.show_problem, error)
            return
        if replaced or lines:
            self.app.call_from_thread(self._add_lines, tail, replaced, [shown_line(line) for line in lines])

    def _add_lines(self, tail: LogTail, replaced: bool, lines: list[str]) -> None:
        if tail is not self._tail:
            return  # the user has chosen another source meanwhile
        log = self.query_one("#log", RichLog)
        follows = log.is_vertical_scroll_end
        if replaced:
            log.clear()
        for line in lines:
            log.write(Text(line), scroll_end=False)
        if follows:
            log.scroll_end(animate=False)

    @work(thread=True, exclusive=True, group="script", exit_on_error=False)
    def read_script(self) -> None:
        try:
            text = self.app.runs.script(self._row.path)
        except FileNotFoundError:
            text = "This run has no batch script."
        except OSError as error:
            self.app.call_from_thread(self.app.show_problem, error)
            return
        shown = Text("\n".join(clean(line.expandtabs(4)) for line in text.splitlines()))
        self.app.call_from_thread(self.query_one("#text", Static).update, shown)
