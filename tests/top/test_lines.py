"""Texts of ``hpcaccel top``: bars, ranks, and the end of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("textual")

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.top.log_tail import FIRST_BYTES, MERGED, LogTail, shown_line
from hpcaccel.top.run_lines import life_line, rank_lines, sparkline, sweep_lines
from hpcaccel.view.life_bar import LifePart
from hpcaccel.view.rank_states import RankState
from hpcaccel.view.sweep_view import sweep_view
from tests.test_recorded import Machine
from tests.view.conftest import HandMade
from tests.view.conftest import hand_made as hand_made


def test_sparkline_averages_neighbours() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, float("nan"), 3], 9) == "▄▄"
    assert sparkline([float("inf")], 9) == ""


def test_bar_of_a_life_shows_short_losses() -> None:
    def part(name: str, started: float, ended: float) -> LifePart:
        return LifePart(part=name, started=started, ended=ended, attempt=1)

    parts = [part("queued", 0, 30), part("training", 30, 99), part("lost", 99, 100), part("paused", 100, 120)]
    assert life_line(parts, 12).plain == "···██████x──"
    assert life_line([], 12).plain == ""


def test_ranks_that_do_not_work_are_named() -> None:
    def rank(number: int, state: str, *, ratio: float | None = None, idle_gpu: bool = False) -> RankState:
        return RankState(
            rank=number, node=f"n{number // 2}", local_rank=0, step=1, step_seconds=1.0, state=state,
            ratio=ratio, idle_gpu=idle_gpu,
        )  # fmt: skip

    ranks = [rank(0, "ok"), rank(1, "slow", ratio=1.5), rank(2, "silent"), rank(3, "ok", idle_gpu=True)]
    assert [line.plain for line in rank_lines(ranks, 60)] == [
        "n0 ●s",
        "n1 ?i",
        "rank 1 on n0: slow, 1.5 times the median",
        "rank 2 on n1: silent",
        "rank 3 on n1: its GPU is idle",
        "● working  s slow  ? silent  X at fault  i idle GPU",
    ]
    assert [line.plain for line in rank_lines([rank(0, "ended")], 60)] == ["n0 ·"]


def test_sweep_fits_its_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = next((Machine(tmp_path / "recorded").folder / "work" / "runs" / "tuned").iterdir())
    shown = sweep_lines(sweep_view(SweepDir(path)), width=78).plain
    assert "best      loss 0.3944, trial 0" in shown
    assert "args.lr = 0.2308" in shown
    assert all(len(line) <= 78 for line in shown.splitlines())


def test_log_is_read_only_where_it_has_grown(hand_made: HandMade) -> None:
    tail = LogTail(hand_made.run)
    assert tail.new() == (False, [])
    hand_made.start(1)
    hand_made.log(1, 0, b"one\ntwo\nthr")
    assert tail.new() == (True, ["one", "two"])
    assert tail.new() == (False, [])
    hand_made.log(1, 0, b"ee\n")
    assert tail.new() == (False, ["three"])
    hand_made.run.rank_log(1, 0).write_bytes(b"anew\n")
    assert tail.new() == (True, ["anew"])
    hand_made.start(2)
    hand_made.log(2, 0, b"second attempt\n")
    assert tail.new() == (True, ["second attempt"])


def test_only_the_end_of_a_long_log_is_read(hand_made: HandMade) -> None:
    hand_made.start(1)
    hand_made.log(1, 0, b"".join(b"line %08d\n" % number for number in range(100_000)))
    replaced, lines = LogTail(hand_made.run).new()
    assert replaced
    assert lines[-1] == "line 00099999"
    assert len(lines) == FIRST_BYTES // 14
    assert all(len(line) == 13 for line in lines)


def test_merged_log_is_read_again_only_after_a_change(hand_made: HandMade) -> None:
    hand_made.start(1)
    hand_made.log(1, 0, b"same\nzero\n")
    hand_made.log(1, 1, b"one\n")
    tail = LogTail(hand_made.run, MERGED)
    replaced, lines = tail.new()
    assert replaced
    assert sorted(lines) == ["[0] same", "[0] zero", "[1] one"]
    assert tail.new() == (False, [])
    hand_made.log(1, 1, b"two\n")
    assert len(tail.new()[1]) == 4


def test_escape_sequences_and_progress_bars_are_removed() -> None:
    assert shown_line("\x1b[31mred\x1b[0m\x1b]") == "red"
    assert shown_line(" 10%\r 20%\r 30%\r") == " 30%"
    assert shown_line("a\tb\x07") == "a       b\\x07"
