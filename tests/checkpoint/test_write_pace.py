"""Writes that are spread over some time, until somebody waits for them."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hpcaccel.checkpoint import CheckpointEngine, TrainingState, write_pace, writer
from hpcaccel.checkpoint.rank_file_writer import RankFileWriter
from hpcaccel.checkpoint.write_pace import LOWEST_RATE, PIECE_BYTES, WritePace
from hpcaccel.checkpoint.writer import WriterProcess
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.runtime.training.agreed_actions import AgreedActions, AgreementPace
from hpcaccel.runtime.training.save_schedule import SPREAD_PART, SaveSchedule
from hpcaccel.runtime.training.stop_agreement import StopDecision
from tests.checkpoint.test_background import Holder, settle

LONG = 10 * PIECE_BYTES


def ends(work) -> bool:
    """Whether ``work`` ends within a minute, in a thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_slow_pace_has_short_pieces_and_full_speed_has_one():
    hurry = threading.Event()
    slow, fast = WritePace(LONG, 1000, hurry), WritePace(LONG, 0, hurry)
    assert (slow.step(LONG), slow.step(5)) == (PIECE_BYTES, 5)
    assert fast.step(LONG) == LONG
    assert fast.wait(LONG) == 0
    hurry.set()
    assert slow.step(LONG) == LONG
    assert slow.wait(LONG) == 0


def test_pace_is_never_slower_than_the_lowest_rate(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    waits: list[float] = []
    hurry = SimpleNamespace(is_set=lambda: False, wait=waits.append)
    WritePace(LONG, 1e6, hurry).wait(LONG // 2)  # type: ignore[arg-type]
    WritePace(LONG, 0.25, hurry).wait(LONG // 2)  # type: ignore[arg-type]
    assert waits == [pytest.approx(LONG / 2 / LOWEST_RATE), pytest.approx(0.125)]


@pytest.mark.parametrize("spread", [0.0, 1e9])
def test_file_has_all_bytes_whether_it_was_hurried_or_not(tmp_path, monkeypatch, spread):
    monkeypatch.setattr(write_pace, "LOWEST_RATE", 1.0)  # a byte per second
    monkeypatch.setattr(write_pace, "PIECE_BYTES", 1 << 16)
    content = random.Random(1).randbytes(1 << 18)
    hurry = threading.Event()
    files = RankFileWriter(memoryview(bytearray(content)), hurry)
    paths = SavePaths(tmp_path, 1, 0)
    paths.temporary.mkdir()
    order = {"lengths": [100_032, 64, 1 << 17], "file": "rank_00000.bin", "base": None, "seconds": spread}
    found: list = []
    if spread:
        threading.Timer(0.2, hurry.set).start()
    assert ends(lambda: found.append(files.write(order, paths)))
    size = sum(order["lengths"])
    assert (paths.temporary / "rank_00000.bin").read_bytes() == content[:size]
    assert found[0].bytes == size
    assert (files.waited > 0) is bool(spread)


def test_slow_save_that_nobody_waits_for_is_committed(tmp_path):
    saved: list = []
    engine = CheckpointEngine(tmp_path, on_saved=saved.append)
    engine.background.spread_seconds = 1000
    value = torch.arange(5_000_000.0)
    path = engine.save(TrainingState(objects={"x": Holder(value)}), step=1, background=True)
    settle(engine)
    engine.close()
    holder = Holder(None)
    engine.load(path, TrainingState(objects={"x": holder}))
    assert torch.equal(holder.value, value)
    assert 0 <= saved[0].waited_seconds < saved[0].seconds


@pytest.mark.parametrize("way", ["drain", "next save", "exit", "find"])
def test_writer_is_hurried_once_when_somebody_waits(tmp_path, monkeypatch, way):
    calls: list[int] = []
    monkeypatch.setattr(WriterProcess, "hurry", lambda self: calls.append(1))
    engine = CheckpointEngine(tmp_path)
    state = TrainingState(per_rank={"x": 1})
    engine.save(state, step=1, background=True)
    while engine.progress() == "busy":
        time.sleep(0.002)
    assert calls == []
    {
        "drain": engine.drain,
        "next save": lambda: engine.save(state, step=2),
        "exit": engine.background.wait_at_exit,
        "find": engine.find,
    }[way]()
    engine.background.hurry()
    engine.close()
    assert calls == [1]


def test_hurry_is_a_line_between_orders():
    order = b'{"step": 2, "chunks_bytes": 3}\nabc'
    first, chunks, rest = writer._split_order(b'{"hurry": true}\n' + order) or pytest.fail("no order")
    assert (first, chunks, rest) == ({"hurry": True}, b"", order)
    assert writer._split_order(order[:-1]) is None


# -- when, and for how long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "per_step", "expected"),
    [(False, 0.5, 10.0), (False, None, 100.0), (False, 9.0, 100.0), (True, 0.5, 0.0)],
)
def test_save_is_spread_over_a_part_of_the_time_until_the_next(monkeypatch, requested, per_step, expected):
    schedule = SaveSchedule.__new__(SaveSchedule)
    schedule.is_managed = schedule.has_place = True
    schedule._stop = SimpleNamespace(save_is_requested=requested)
    schedule._settings = SimpleNamespace(every_steps=20)
    schedule._clock = SimpleNamespace(median_step_seconds=per_step)
    schedule._group = SimpleNamespace(max_of=lambda value, what: max(value, -500_000))
    monkeypatch.setattr(time, "monotonic", lambda: 1100.0)
    schedule._saved_at = 1000.0
    assert schedule._spread_seconds() == pytest.approx(SPREAD_PART * expected)


class Checkpoints:
    in_flight = True

    def __init__(self) -> None:
        self.hurried = 0

    def hurry(self) -> None:
        self.hurried += 1


@pytest.mark.parametrize("raised", [False, True])
def test_stop_hurries_the_save_in_flight_as_soon_as_a_rank_knows_of_it(raised):
    actions = AgreedActions.__new__(AgreedActions)
    actions._checkpoints = checkpoints = Checkpoints()
    actions._flag = SimpleNamespace(raised=raised)
    actions._own_time = None
    actions._in_use = SimpleNamespace(passes=0)
    actions._counters = SimpleNamespace(step=1)
    actions._saves = SimpleNamespace(is_due=lambda step: False, background_progress=1, due_step=9)
    actions._pace = AgreementPace()
    actions._snapshots = SimpleNamespace(due_step=9)
    actions._agreement = SimpleNamespace(issue=lambda **_: None)
    actions._issue()
    assert checkpoints.hurried == raised
    actions._end = SimpleNamespace(stop=lambda: checkpoints.hurried > raised or pytest.fail("not hurried before"))
    actions._act(StopDecision(stop=True, saving=1))
