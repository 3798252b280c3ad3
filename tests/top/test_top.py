"""``hpcaccel top``: driven by keys in a terminal of 80 columns and 24 lines, in this process and in a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import ContentSwitcher, DataTable, RichLog, Static

from hpcaccel.cli.main import program
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError
from hpcaccel.top.confirm_screen import ConfirmScreen
from hpcaccel.top.run_screen import RunScreen
from hpcaccel.top.top_app import TopApp
from hpcaccel.top.watched_runs import Action, Watched, WatchedRuns
from hpcaccel.view.run_overview import RunRow, listed
from tests.view.conftest import HandMade

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
Test = Callable[[Pilot[None], TopApp, "Fixed"], Awaitable[None]]


class Fixed(WatchedRuns):
    """Runs of a folder; actions are recorded, and fail if ``problem`` is set."""

    def __init__(self, runs: list[HandMade]) -> None:
        super().__init__()
        self.dirs = [made.run for made in runs]
        self.changes: dict[str, dict[str, Any]] = {}
        self.acted: list[tuple[str, Action]] = []
        self.problem: Exception | None = None
        self.calls = 0

    def called_more_than(self, calls: int) -> bool:
        return self.calls > calls

    def rows(self) -> tuple[list[tuple[RunRow, bool]], int]:
        self.calls += 1
        if isinstance(self.problem, UserError):
            raise self.problem
        rows = [replace(row, **self.changes.get(row.run_id, {})) for row in listed(self.dirs)]
        return [(row, False) for row in rows], len(rows)

    def look(self, path: str, *, is_sweep: bool) -> Watched:
        found = super().look(path, is_sweep=is_sweep)
        assert found.run is not None
        return replace(found, run=replace(found.run, **self.changes.get(found.run.run_id, {})))

    def act(self, path: str, action: Action) -> str:
        self.acted.append((RunDir(path).run_id, action))
        if self.problem is not None:
            raise self.problem
        return f"{action} requested"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("HPCACCEL_RUNS_DIR", raising=False)


def trained(folder: Path, run_id: str, name: str, *, reason: str = "completed") -> HandMade:
    made = HandMade(folder / "runs" / "gpt" / run_id, name=name)
    made.run.script.write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    made.start(1)
    made.progress(1, total_steps=100)
    for step in range(1, 51):
        made.metric(step, attempt=1, time=1000.0 + step, loss=4.0 - step / 20)
    made.log(1, 0, b"first line\nstep 50 \x1b[31mred\x1b[0m [bold]not markup[/bold]\n")
    failed = {"error_class": "user_error", "detail": "rank 0 on n1: exit code 1"} if reason == "failed" else {}
    made.end(1, reason=reason, last_step=50, **failed)
    return made


@pytest.fixture
def runs(tmp_path: Path) -> list[HandMade]:
    return [
        trained(tmp_path, "20261120-153014-4f2c", "gpt [red]markup[/red]"),
        trained(tmp_path, "20261120-153013-4f2b", "broken", reason="failed"),
        trained(tmp_path, "20261120-153012-4f2a", "older"),
    ]


def drive(runs: list[HandMade], test: Test, *, size: tuple[int, int] = (80, 24), prepare: Any = None) -> None:
    """Run ``test`` in the program; all readings happen at once, so that tests read by calling the program."""

    async def main() -> None:
        fixed = Fixed(runs)
        if prepare is not None:
            prepare(fixed)
        app = TopApp(fixed, seconds=3600, log_seconds=3600)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app._is_read or fixed.problem is not None)
            await test(pilot, app, fixed)

    asyncio.run(main())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        await pilot.pause(0.02)


def names(app: TopApp) -> list[str]:
    table = app.screen_stack[0].query_one("#table", DataTable)
    return [str(table.get_row_at(place)[1]) for place in range(table.row_count)]


def text_of(app: TopApp, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).content)


def log_lines(app: TopApp) -> list[str]:
    return [strip.text.rstrip() for strip in app.screen.query_one("#log", RichLog).lines]


async def opened(pilot: Pilot[None], app: TopApp) -> None:
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(app.screen, RunScreen) and "progress" in text_of(app, "#facts"))


def test_list_shows_runs_and_fits_80_columns(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        assert names(app) == ["gpt [red]markup[/red]", "broken", "older"]
        table = app.query_one("#table", DataTable)
        assert table.virtual_size.width <= 80, "no column is cut off"
        assert [str(cell) for cell in table.get_row_at(1)] == ["failed", "broken", "50/100", "50.0 %", "1.5", ""]
        await pilot.resize_terminal(140, 40)
        await until(pilot, lambda: len(table.get_row_at(0)) == 7)
        assert str(table.get_row_at(0)[-1]) == "20261120-153014-4f2c"

    drive(runs, test)


def test_filter_and_active_runs(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await pilot.press("slash", *"brok", "enter")
        await until(pilot, lambda: names(app) == ["broken"])
        await pilot.press("escape")
        await until(pilot, lambda: len(names(app)) == 3)
        await pilot.press("a")
        await until(pilot, lambda: names(app) == [])
        assert "No run matches" in text_of(app, "#empty")
        fixed.changes["20261120-153012-4f2a"] = {"state": "running"}
        app.read_rows()
        await until(pilot, lambda: names(app) == ["older"])

    drive(runs, test)


def test_without_runs_the_next_step_is_shown() -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        assert "hpcaccel submit job.yaml" in text_of(app, "#empty")
        await pilot.press("enter", "c")
        assert len(app.screen_stack) == 1

    drive([], test)


def test_only_changed_cells_are_drawn_again(runs: list[HandMade], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        drawn: list[tuple[Any, ...]] = []
        monkeypatch.setattr(DataTable, "update_cell", lambda _, *args, **more: drawn.append(args))
        monkeypatch.setattr(DataTable, "clear", lambda *args, **more: pytest.fail("the table was drawn again"))
        for changes in ({}, {"step": 60}):
            fixed.changes["20261120-153012-4f2a"] = changes
            calls, before = fixed.calls, len(drawn)
            app.read_rows()
            await until(pilot, partial(fixed.called_more_than, calls))
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert len(drawn) - before == 2 * bool(changes), "step and share"

    drive(runs, test)


def test_one_run_shows_its_overview(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await opened(pilot, app)
        shown = text_of(app, "#facts")
        assert "state     completed" in shown
        assert "progress  step 50/100   50.0 %" in shown
        assert "loss      1.5 from 3.95  █" in shown
        assert all(len(line) <= 80 for line in shown.splitlines())
        assert "gpt [red]markup[/red]" in text_of(app, "#title")
        await pilot.press("q")
        await until(pilot, lambda: len(app.screen_stack) == 1)

    drive(runs, test)


def test_failed_run_shows_the_traceback_of_the_rank_that_failed(runs: list[HandMade]) -> None:
    lines = "".join(f'  File "train.py", line {number}, in f\n' for number in range(20))
    runs[1].log(1, 0, f"Traceback (most recent call last):\n{lines}ValueError: too wide\n".encode())

    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await pilot.press("down")
        await opened(pilot, app)
        shown = text_of(app, "#facts").splitlines()
        assert shown[1] == "failed    Rank 0 failed first:"
        assert shown[9].strip() == "ValueError: too wide"
        assert "Traceback (most recent call last):" in shown, "the whole one is at the end"

    drive(runs, test)


def test_log_follows_and_the_next_source_is_chosen(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await opened(pilot, app)
        await pilot.press("l")
        await until(pilot, lambda: log_lines(app) == ["first line", "step 50 red [bold]not markup[/bold]"])
        runs[0].log(1, 0, b"one more\nincompl")
        cast("RunScreen", app.screen).read_log()
        await until(pilot, lambda: log_lines(app)[2:] == ["one more"])
        runs[0].log(1, "supervisor", b"the supervisor's line\n")
        await pilot.press("n", "n")
        await until(pilot, lambda: log_lines(app) == ["the supervisor's line"])
        assert "log of supervisor" in text_of(app, "#title")

    drive(runs, test)


def test_script_is_shown(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await opened(pilot, app)
        await pilot.press("b")
        await until(pilot, lambda: text_of(app, "#text") == "#!/bin/bash\n#SBATCH --nodes=1")
        assert app.screen.query_one(ContentSwitcher).current == "script"

    drive(runs, test)


@pytest.mark.parametrize(
    ("key", "action"),
    [("s", "stop"), ("c", "cancel"), ("r", "resume"), ("w", "save"), ("u", "requeue"), ("f", "finish")],
)
def test_action_is_carried_out_only_after_y(runs: list[HandMade], key: str, action: Action) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        for no in ("n", "escape", "enter"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
            await pilot.press(no)
            await until(pilot, lambda: len(app.screen_stack) == 1)
        assert fixed.acted == []
        await pilot.press("down", key)
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: fixed.acted == [("20261120-153013-4f2b", action)])
        await until(pilot, lambda: any(f"{action} requested" in note.message for note in app._notifications))

    drive(runs, test)


def test_refused_action_shows_why(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await opened(pilot, app)
        fixed.problem = UserError("it has [ended] already")
        await pilot.press("c", "y")
        await until(pilot, lambda: any("it has [ended] already" in note.message for note in app._notifications))

    drive(runs, test)


def test_problem_of_reading_is_shown_and_goes_away(runs: list[HandMade]) -> None:
    def prepare(fixed: Fixed) -> None:
        fixed.problem = UserError("the disk is away")

    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        await until(pilot, lambda: "the disk is away" in text_of(app, "#problem"))
        fixed.problem = None
        app.read_rows()
        await until(pilot, lambda: len(names(app)) == 3)
        assert not app.query_one("#problem").has_class("shown")

    drive(runs, test, prepare=prepare)


def test_reading_does_not_block_the_keys(runs: list[HandMade]) -> None:
    async def test(pilot: Pilot[None], app: TopApp, fixed: Fixed) -> None:
        free = threading.Event()
        rows = fixed.rows
        fixed.rows = lambda: (free.wait(PATIENCE_SECONDS), rows())[1]  # type: ignore[method-assign]
        app.read_rows()
        await pilot.press("a")
        await until(pilot, lambda: names(app) == [])
        free.set()

    drive(runs, test)


def test_rows_are_read_with_results_of_slurm_that_may_be_a_minute_old(
    runs: list[HandMade], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def fake(dirs: Any, **options: Any) -> list[RunRow]:
        asked.append(options)
        return listed(dirs)

    for made in runs:
        register(made.run, name="gpt", job_id="local-1")
    monkeypatch.setattr("hpcaccel.top.watched_runs.listed", fake)
    rows, count = WatchedRuns(2).rows()
    assert ([row.run_id for row, _ in rows], count) == (["20261120-153014-4f2c", "20261120-153013-4f2b"], 3)
    assert asked == [{"patient": True}]
    assert WatchedRuns().look(rows[0][0].path, is_sweep=False).run.state == "completed"


def test_missing_textual_and_missing_terminal_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(program(), ["top"])
    assert result.exit_code == 2
    assert "top needs a terminal" in result.output
    monkeypatch.setattr("hpcaccel.cli.top.importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(program(), ["top"])
    assert result.exit_code == 2
    assert "pip install 'hpcaccel[ui]'" in result.output


@pytest.mark.chaos
def test_in_a_real_terminal(runs: list[HandMade], tmp_path: Path) -> None:
    """The program starts in a terminal of 80×24, shows a run after Enter, and leaves the terminal as it was."""
    for made in runs:
        register(made.run, name=made.run.run_id, job_id="local-1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcaccel", "top"], stdin=slave, stdout=slave, stderr=slave, env=environment,
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    seen = bytearray()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            if select.select([master], [], [], 0.1)[0]:
                seen.extend(os.read(master, 65536))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for keys, text in (
            (b"", b"broken"),
            (b"\r", b"progress"),
            (b"l", b"first line"),
            (b"c", b"Cancel"),
            (b"n", b""),
        ):
            os.write(master, keys)
            end = time.monotonic() + PATIENCE_SECONDS
            while text not in seen:
                assert time.monotonic() < end, bytes(seen[-2000:])
                time.sleep(0.1)
        time.sleep(5)  # until the question is gone from the screen
        quiet = len(seen)
        time.sleep(11)
        assert len(seen) - quiet < 100, "two readings without a change: hardly anything is sent"
        os.write(master, b"qq")
        assert process.wait(PATIENCE_SECONDS) == 0
        assert termios.tcgetattr(slave) == before
    finally:
        ended.set()
        reader.join()
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
