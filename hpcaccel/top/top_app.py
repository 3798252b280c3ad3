"""The terminal program: the list of runs, actions after a question, and messages about what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable, Footer, Input, Static

from hpcaccel.core.formatting import clean, duration, number, percent, step_of
from hpcaccel.errors import HpcaccelError
from hpcaccel.top.confirm_screen import ACTION_KEYS, ConfirmScreen
from hpcaccel.top.run_screen import RunScreen
from hpcaccel.top.watched_runs import ACTIONS, Action, WatchedRuns
from hpcaccel.view.run_overview import RunRow
from hpcaccel.view.run_tables import state_text

__all__ = ["TopApp"]

WIDTHS = {"state": 10, "name": 0, "step": 11, "done": 7, "loss": 8, "left": 7, "run": 20}
"""Widths of the columns; the name gets what is left."""
NARROW = 104
"""With fewer columns, the terminal has no room for the run id."""


class TopApp(App[None]):
    """The runs of this account in a terminal, for the keyboard.

    Args:
        runs: where data comes from and actions go.
        first: a run to open at once, as a path.
        seconds: time between two readings of run directories. Slurm is queried much less often, see ``WatchedRuns``.
        log_seconds: time between two looks at the log that is shown.
    """

    TITLE = "hpcaccel top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #title, #head { height: 1; padding: 0 1; background: $primary-background; }
    #table { height: 1fr; scrollbar-size: 1 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.shown { display: block; }
    #problem { height: auto; max-height: 3; padding: 0 1; color: $text-warning; display: none; }
    #problem.shown { display: block; }
    #empty { padding: 1 2; display: none; }
    #empty.shown { display: block; }
    ContentSwitcher { height: 1fr; }
    #overview, #script { height: 1fr; padding: 0 1; scrollbar-size: 1 1; }
    #log { height: 1fr; padding: 0 1; scrollbar-size: 1 1; background: $background; }
    ConfirmScreen { align: center middle; background: $background 60%; }
    #question { width: 64; max-width: 95%; height: auto; padding: 1 2; background: $surface; border: round $warning; }
    #answers { margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("enter", "open", "Open", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("a", "active_only", "Active"),
        *ACTION_KEYS,
    ]

    def __init__(
        self,
        runs: WatchedRuns | None = None,
        *,
        first: str | None = None,
        seconds: float = 5.0,
        log_seconds: float = 2.0,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.runs = WatchedRuns() if runs is None else runs
        self.seconds, self.log_seconds = seconds, log_seconds
        self._first = first
        self._rows: dict[str, tuple[RunRow, bool]] = {}
        self._all = 0
        self._filter, self._active_only = "", False
        self._cells: dict[str, dict[str, Text]] = {}
        self._titles: list[str] = []
        self._is_read = False

    def compose(self) -> ComposeResult:
        yield Static(Text("hpcaccel top", style="bold"), id="head")
        yield Input(placeholder="part of a name, a run id or a state; Esc shows all", id="filter")
        yield Static("", id="empty")
        yield DataTable(id="table", cursor_type="row")
        yield Static("", id="problem")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        table = self._table()
        self._add_columns(self.size.width)
        table.focus()
        self.query_one("#filter", Input).cursor_blink = False
        self.read_rows()
        self.set_interval(self.seconds, self._read_rows_if_shown)

    def _add_columns(self, width: int) -> None:
        table = self._table()
        self._titles = [title for title in WIDTHS if title != "run" or width >= NARROW]
        rest = width - 1 - sum(WIDTHS[title] + 2 for title in self._titles)
        for title in self._titles:
            side: Literal["left", "right"] = "right" if title in ("step", "done", "loss", "left") else "left"
            table.add_column(Text(title, justify=side), key=title, width=WIDTHS[title] or max(12, rest))

    def on_resize(self, event: Resize) -> None:
        if self._titles:
            self._table().clear(columns=True)
            self._cells = {}
            self._add_columns(event.size.width)
            self._draw()

    def _table(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one("#table", DataTable)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_rows_if_shown(self) -> None:
        if len(self.screen_stack) == 1:
            self.read_rows()

    @work(thread=True, exclusive=True, group="rows", exit_on_error=False)
    def read_rows(self) -> None:
        try:
            rows, count = self.runs.rows()
        except (HpcaccelError, OSError) as error:
            self.call_from_thread(self.show_problem, error)
            return
        self.call_from_thread(self._take_rows, rows, count)

    def _take_rows(self, rows: list[tuple[RunRow, bool]], count: int) -> None:
        self._rows = {row.path: (row, is_sweep) for row, is_sweep in rows}
        self._all, self._is_read = count, True
        notes = dict.fromkeys(row.note for row, _ in rows if row.note)
        self.show_problem(next(iter(notes), ""))
        self._draw()
        if self._first is not None:
            first, self._first = self._first, None
            self._open(first)

    def show_problem(self, problem: BaseException | str) -> None:
        """Show what went wrong below the table; an empty text hides the message."""
        line = self.screen_stack[0].query_one("#problem", Static)
        line.update(Text(clean(str(problem))))
        line.set_class(bool(str(problem)), "shown")
        if isinstance(problem, BaseException) and len(self.screen_stack) > 1:
            self.notify(Text(clean(str(problem))).markup, severity="error", timeout=8)

    # -- the table --------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Bring the table up to date: only cells that differ are drawn again."""
        table = self._table()
        shown = {path: _cells(row, is_sweep) for path, (row, is_sweep) in self._rows.items() if self._wanted(row)}
        if list(shown) != list(self._cells):
            chosen = self._chosen()
            table.clear()
            for path, cells in shown.items():
                table.add_row(*(cells[title] for title in self._titles), key=path)
            if chosen in shown:
                table.move_cursor(row=list(shown).index(chosen), animate=False)
        else:
            for path, cells in shown.items():
                for title in self._titles:
                    if cells[title] != self._cells[path][title]:
                        table.update_cell(path, title, cells[title])
        self._cells = shown
        self._draw_head()

    def _draw_head(self) -> None:
        active = sum(row.state in ("running", "starting", "stopping") for row, _ in self._rows.values())
        waiting = sum(row.state in ("pending", "requeued") for row, _ in self._rows.values())
        head = Text("hpcaccel top", style="bold").append(f"   {active} running, {waiting} waiting", "not bold")
        left = self._all - len(self._rows)
        head.append(f", {left} older ones not shown" if left > 0 else "", "dim not bold")
        head.append("   only active" if self._active_only else "", "yellow not bold")
        head.append(f"   filter: {clean(self._filter)}" if self._filter else "", "yellow not bold")
        main = self.screen_stack[0]
        main.query_one("#head", Static).update(head)
        empty = main.query_one("#empty", Static)
        empty.set_class(not self._cells, "shown")
        nothing = (
            "No run matches. Esc or a shows all." if self._rows else "No runs yet. Start one: hpcaccel submit job.yaml"
        )
        empty.update(Text(nothing if self._is_read else "reading …", style="dim"))

    def _wanted(self, row: RunRow) -> bool:
        if self._active_only and row.state not in ("pending", "starting", "running", "stopping", "requeued"):
            return False
        words = self._filter.lower().split()
        text = f"{row.name} {row.run_id} {row.state} {row.job_id} {row.error_class}".lower()
        return all(word in text for word in words)

    def _chosen(self) -> str | None:
        table = self._table()
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # -- keys -------------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.add_class("shown")
        line.focus()

    def action_active_only(self) -> None:
        self._active_only = not self._active_only
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self._draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self.query_one("#filter", Input).set_class(bool(self._filter), "shown")
        self._table().focus()

    def key_escape(self) -> None:
        if len(self.screen_stack) > 1:
            return
        line = self.query_one("#filter", Input)
        line.value = ""
        line.remove_class("shown")
        self._active_only = False
        self._table().focus()
        self._draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self._open(event.row_key.value)

    def _open(self, path: str) -> None:
        if path in self._rows:
            row, is_sweep = self._rows[path]
            self.push_screen(RunScreen(row, is_sweep=is_sweep))

    def action_act(self, action: Action) -> None:
        chosen = self._chosen()
        if chosen is not None and len(self.screen_stack) == 1:
            self.ask(self._rows[chosen][0], action, then=self.read_rows)

    def ask(self, row: RunRow, action: Action, *, then: Callable[[], object]) -> None:
        """Ask whether to carry out ``action``. If the user agrees, carry it out, and call ``then``."""
        word, follows = ACTIONS[action]

        def answered(yes: bool | None) -> None:
            if yes:
                self.act(row.path, action, then)

        self.push_screen(ConfirmScreen(f"{word} {clean(row.name)} {row.run_id}?", follows), answered)

    @work(thread=True, exit_on_error=False)
    def act(self, path: str, action: Action, then: Callable[[], object]) -> None:
        try:
            done = self.runs.act(path, action)
        except (HpcaccelError, OSError) as error:
            self.call_from_thread(self.notify, clean(str(error)), severity="error", timeout=10, markup=False)
            return
        self.call_from_thread(self.notify, clean(done), timeout=5, markup=False)
        self.call_from_thread(then)


def _cells(row: RunRow, is_sweep: bool) -> dict[str, Text]:
    state = state_text(row.state)
    done = "" if row.step is None or not row.total_steps else percent(min(1.0, row.step / row.total_steps))
    left = "" if row.eta_seconds is None else duration(row.eta_seconds)
    name = f"{clean(row.name)} (sweep)" if is_sweep else clean(row.name)
    return {
        "state": Text(state.text, style=state.style),
        "name": Text(name, overflow="ellipsis", no_wrap=True),
        "step": Text("" if row.step is None else step_of(row.step, row.total_steps), justify="right"),
        "done": Text(done, justify="right"),
        "loss": Text("" if row.last_loss is None else number(row.last_loss), justify="right"),
        "left": Text(left, justify="right"),
        "run": Text(row.run_id, style="dim"),
    }
