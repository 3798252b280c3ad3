"""Tests of hang detection: when ranks hang, and which rank is the culprit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.failures.hangs import HangWatch, culprit, find_hang, is_stopped, limit_seconds
from hpcaccel.node.failures.heartbeats import Heartbeats, RankSign

from .conftest import LocalRun

Make = Callable[..., LocalRun]


def sign(
    rank: int = 0, *, silent: float = 1, idle: float = 0, still: float | None = None, node: str = "", **facts: Any
) -> RankSign:
    values = {"pid": 1, "number": 9, "time": 0.0, "interval_seconds": 10.0, "phase": "training", "step": 70}
    beat = Beat(rank=rank, host=node or f"n{rank // 2}", **{**values, "site": "train.py:31", "waits": True, **facts})
    return RankSign(beat=beat, silent=silent, idle=idle, still=idle if still is None else still)


def never(sign: RankSign) -> bool:
    return False


def hang(*signs: RankSign, setting: int | None = None, stopped: Callable[[RankSign], bool] = never) -> str | None:
    found = find_hang(signs, setting, stopped)
    return None if found is None else found.why


# -- time limits -------------------------------------------------------------------------------------------------------


def test_limit_follows_the_slowest_ranks_step_duration() -> None:
    assert limit_seconds(None, [sign(), sign(1)]) == 600
    assert limit_seconds(None, [sign(step_seconds=2.0), sign(1, step_seconds=90.0)]) == 1800
    assert limit_seconds(40, [sign(step_seconds=90.0)]) == 40


def test_no_progress_of_any_rank_for_longer_than_the_limit_is_a_hang() -> None:
    assert hang(sign(idle=601), sign(1, idle=601))
    assert hang(sign(idle=599), sign(1, idle=700)) is None
    assert hang(sign(idle=1e6), sign(1, idle=1e6), setting=0) is None


@pytest.mark.parametrize("facts", [{"phase": "saving"}, {"phase": "loading"}, {"step": 20, "first_step": 20}])
def test_saves_loads_and_the_first_step_may_take_longer(facts: dict[str, Any]) -> None:
    assert hang(sign(idle=1700, **facts), sign(1, idle=1700, **facts)) is None
    assert hang(sign(idle=1900, **facts), sign(1, idle=1900, **facts))


def test_rank_with_a_changing_stack_has_a_longer_limit() -> None:
    others = [sign(rank, idle=1700) for rank in (1, 2)]
    assert hang(sign(idle=1700, still=5), *others) is None
    assert hang(sign(idle=1900, still=5), *[sign(rank, idle=1900) for rank in (1, 2)])


def test_single_rank_has_a_longer_limit() -> None:
    assert hang(sign(idle=1700)) is None
    assert hang(sign(idle=1900))


@pytest.mark.parametrize("phase", ["starting", "finishing", "leaving"])
def test_rank_before_or_after_the_training_loop_does_not_hang(phase: str) -> None:
    waits = phase != "leaving"  # a rank in a collective would wait in vain for one that has left
    assert hang(sign(idle=1e5, phase=phase), sign(1, idle=1e5, waits=waits)) is None
    other = sign(1, idle=1e5, step=3, first_step=3, waits=waits)
    assert hang(sign(idle=1e5, silent=1e5, phase=phase), other) is None


def test_rank_that_left_its_loop_is_the_culprit_if_others_wait_for_it() -> None:
    waiting = [sign(rank, idle=700, site="train.py:31") for rank in (0, 1, 2)]
    gone = sign(3, idle=700, phase="leaving", step=10, left="train.py:20", waits=False)
    found = find_hang([*waiting, gone], None, never)
    assert found is not None
    assert (found.culprit_rank, found.node) == (3, "n1")
    assert found.why == (
        "rank 3 on n1 has left its loop at train.py:20 and reached the end of the program at step 10; the remaining "
        "ranks have been waiting for 700 s at train.py:31"
    )
    # Its process may have ended by then.
    assert hang(*waiting, sign(3, idle=700, silent=650, phase="leaving", left="train.py:20"))
    assert hang(*waiting[:2], sign(2, idle=599), gone) is None
    found = find_hang([*waiting[:2], sign(2, silent=320, idle=320), gone], None, never)
    assert found is not None
    assert found.culprit_rank == 2, "a silent rank may be why the other one has left"


def test_working_rank_does_not_hang_while_the_others_are_at_the_end() -> None:
    gone = [sign(rank, idle=5000, phase="leaving") for rank in (1, 2, 3)]
    assert hang(sign(0, idle=5000, still=5000, waits=False, site="train.py:80"), *gone) is None
    assert hang(sign(0, idle=5000, waits=True, site="train.py:80"), *gone)


def test_silent_rank_hangs_after_the_others_have_waited_for_it() -> None:
    others = [sign(rank, idle=310) for rank in (0, 1, 3)]
    why = hang(*others, sign(2, silent=320, idle=320))
    assert why is not None
    assert why.startswith("rank 2 on n1 has sent no heartbeat for 320 s (stopped, or in C code that holds the GIL")
    assert hang(*others[:2], sign(3, idle=3), sign(2, silent=320, idle=320)) is None
    assert hang(*others, sign(2, silent=59, idle=320)) is None


def test_silent_starting_rank_hangs_if_the_others_have_done_steps() -> None:
    others = [sign(rank, idle=310, step=14) for rank in (0, 1, 3)]
    found = hang(*others, sign(2, silent=320, idle=320, phase="starting", step=0))
    assert found is not None
    assert found.startswith("rank 2 on n1 has sent no heartbeat for 320 s")
    assert hang(*others, sign(2, silent=320, idle=320, phase="finishing", step=14)) is None


def test_stopped_process_is_a_hang_before_the_limit() -> None:
    found = find_hang([sign(idle=70), sign(1, silent=65, idle=75)], None, lambda sign: sign.beat.rank == 1)
    assert found is not None
    assert (found.culprit_rank, found.node) == (1, "n0")
    assert "SIGSTOP" in found.why


def test_silence_of_all_ranks_is_a_hang_only_after_the_limit() -> None:
    """The file system may be unreachable while the training continues."""
    assert hang(*[sign(rank, silent=500, idle=500) for rank in range(4)]) is None
    assert hang(*[sign(rank, silent=700, idle=700) for rank in range(4)])


# -- the culprit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        ({"step": 69}, "has done fewer steps"),
        ({"waits": False, "site": "train.py:20"}, "has not entered the collective"),
        ({"calls": 4}, "has made fewer collective calls"),
        ({"site": "train.py:77"}, "is at a different line"),
    ],
)
def test_rank_that_differs_from_the_others_is_the_culprit(odd: dict[str, Any], word: str) -> None:
    signs = [sign(rank, idle=700, **{"calls": 5, **(odd if rank == 2 else {})}) for rank in range(4)]
    found = culprit(signs)
    assert (found.culprit_rank, found.node) == (2, "n1")
    assert word in found.why


def test_no_rank_is_blamed_if_all_are_at_the_same_line() -> None:
    found = culprit([sign(rank, idle=700) for rank in range(4)])
    assert found.culprit_rank is None
    assert "4 of 4 ranks are at train.py:31" in found.why


# -- reading heartbeats -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def write(run: RunDir, beat: Beat) -> None:
    run.heartbeats(1).mkdir(parents=True, exist_ok=True)
    path = run.heartbeats(1) / f"{beat.rank}.json"
    write_json(path, to_dict(beat), sync=False)
    os.utime(path, ns=(beat.number, beat.number))


def test_heartbeat_ages_are_measured_by_the_supervisors_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(monkeypatch), RunDir(tmp_path)
    seen = Heartbeats(run, 1)
    assert seen.look(expected_seconds=10) == []
    write(run, sign(number=1, time=-1e9, stack=5).beat)
    seen.look(expected_seconds=10)
    clock.now += 10
    write(run, sign(number=2, time=1e12, stack=5, calls=1).beat)
    (now,) = seen.look(expected_seconds=10)
    assert (now.silent, now.idle, now.still) == (0, 0, 10)
    clock.now += 10
    write(run, sign(number=3, stack=6, calls=1).beat)
    (now,) = seen.look(expected_seconds=10)
    assert (now.silent, now.idle, now.still) == (0, 10, 0)


def test_time_while_the_supervisor_was_suspended_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, run = Clock(monkeypatch), RunDir(tmp_path)
    seen = Heartbeats(run, 1)
    write(run, sign().beat)
    seen.look(expected_seconds=10)
    clock.now += 4000
    (now,) = seen.look(expected_seconds=10)
    assert now.silent == 15


def test_touched_heartbeat_file_counts_as_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(monkeypatch), RunDir(tmp_path)
    seen = Heartbeats(run, 1)
    write(run, sign().beat)
    seen.look(expected_seconds=10)
    clock.now += 10
    os.utime(run.heartbeats(1) / "0.json")
    (now,) = seen.look(expected_seconds=10)
    assert (now.silent, now.idle, now.still) == (0, 0, 0)


def test_rank_that_removed_its_heartbeat_file_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(monkeypatch), RunDir(tmp_path)
    seen = Heartbeats(run, 1)
    write(run, sign().beat)
    write(run, sign(1).beat)
    assert len(seen.look(expected_seconds=10)) == 2
    (run.heartbeats(1) / "1.json").unlink()
    clock.now += 10
    assert [(one.beat.rank, one.silent) for one in seen.look(expected_seconds=10)] == [(0, 10)]
    run.heartbeats(1).rename(tmp_path / "away")
    clock.now += 10  # no time passes while the file system is unreachable
    assert [(one.beat.rank, one.silent) for one in seen.look(expected_seconds=10)] == [(0, 10)]


def test_stopped_process_is_detected_on_this_node_only() -> None:
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1)
    try:
        here, there = sign(pid=child, node=node_name()), sign(pid=child, node="elsewhere")
        assert not is_stopped(here)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert is_stopped(here)
        assert not is_stopped(there)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not is_stopped(here)


class NoRanks:
    def __init__(self) -> None:
        self.dumps = 0

    def dump(self) -> None:
        self.dumps += 1

    def wake(self) -> None:
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_ranks_that_write_no_requested_stacks_are_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    clock, run, ranks = Clock(monkeypatch), RunDir(tmp_path), NoRanks()
    run.control.mkdir()
    write(run, sign().beat)
    watch = HangWatch(run, 1, setting=0)
    watch.look(ranks, judging=True)
    assert not (run.stacks(1) / "asked").exists()
    (run.control / "stacks-1").touch()
    watch.look(ranks, judging=True)
    assert int((run.stacks(1) / "asked").read_text()) > 0
    assert [path.name for path in run.control.iterdir()] == ["honoured-stacks-1"]
    if answers:
        (run.stacks(1) / "0.txt").write_text("here")
    clock.now += 30
    watch.look(ranks, judging=True)
    watch.look(ranks, judging=True)
    assert ranks.dumps == (0 if answers else 1)


def test_error_in_a_check_of_the_ranks_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    run.control.mkdir()
    watch = HangWatch(run, 1, setting=None)
    (run.control / "stacks-1").touch()
    (run.stacks(1) / "asked").mkdir()  # cannot be replaced by a file
    assert not watch.look(NoRanks(), judging=True)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cannot check the ranks: ")


# -- the supervisor ----------------------------------------------------------------------------------------------------

PROGRAM = (Path(__file__).parent / "programs" / "stopped_rank.py").read_text()


def test_stopped_rank_ends_the_attempt_with_stacks_of_all_ranks(
    local_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", node_name())
    run = local_run(PROGRAM, ranks=2)
    assert run.run() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    end = run.lines("end")[0]
    assert end["error_class"] == "hang"
    assert "rank 1" in end["detail"]
    assert "SIGSTOP" in end["detail"]
    found = json.loads(run.dir.hang(1).read_text())
    assert (found["culprit_rank"], found["node"]) == (1, node_name())
    for rank in (0, 1):
        assert "most recent call first" in (run.dir.stacks(1) / f"{rank}.txt").read_text()
