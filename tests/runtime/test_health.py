"""Heartbeats, thread stacks on demand, and stragglers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog
from hpcaccel.runtime.health.stragglers import SAMPLE_STEPS, OwnTime, StragglerWatch, slow_ranks
from hpcaccel.runtime.health.thread_stacks import thread_position

from .ranks import ROOT, Ranks, make_run

pytestmark = pytest.mark.torch


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def beat(run: RunDir, rank: int) -> dict[str, Any]:
    return read_json(run.heartbeats(1) / f"{rank}.json") or {}


def test_ranks_record_heartbeats_thread_stacks_and_stragglers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every_steps": None})
    ranks = Ranks("ailing.py", "--slow", "1", "--steps", "260", "--pause", "0.005", size=2, run=run)
    stacks = run.stacks(1)
    try:
        wait_for(lambda: all(beat(run, rank).get("step", 0) > 1 for rank in (0, 1)), "steps in the heartbeats")
        (stacks / "asked").write_text("7")
        wait_for(lambda: " rank 1\n" in (stacks / "1.txt").read_text(), "an answer of rank 1")
        written = len((stacks / "1.txt").read_text())
        ranks.processes[1].send_signal(signal.SIGURG)
        wait_for(lambda: len((stacks / "1.txt").read_text()) > written, "an answer to the signal")
    finally:
        ended = ranks.wait()
    assert ended.codes == [0, 0], ended.outputs
    last = beat(run, 1)
    assert (last["rank"], last["host"], last["pid"]) == (1, node_name(), ranks.processes[1].pid)
    assert (last["step"], last["batches"]) == (260, 260)
    assert last["phase"] in ("finishing", "leaving")  # the last beat may be in either phase
    assert 0 < last["step_seconds"] < 5
    assert last["thread"] in (stacks / "1.txt").read_text()
    assert "ailing.py" in (stacks / "1.txt").read_text()
    line = next(line for line, _ in read_lines(run.stragglers(1)))
    assert [(slow["rank"], slow["node"]) for slow in line["slow"]] == [(1, node_name())]
    assert line["slow"][0]["ratio"] > 1.2
    assert f"rank 1 on {node_name()} takes " in ended.outputs[0]


# -- stacks ------------------------------------------------------------------------------------------------------------

IN_C_CODE = (Path(__file__).parent / "programs" / "keeps_gil.py").read_text()


def test_stacks_show_c_code_that_holds_the_gil_and_omit_forked_workers(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", IN_C_CODE, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"now\n"
    assert (tmp_path / "0.txt").read_text() == ""
    time.sleep(0.1)
    program.send_signal(signal.SIGURG)
    program.wait(30)
    program.stdout.close()
    assert "in keeps_pythons_lock" in (tmp_path / "0.txt").read_text()


def test_thread_position_gives_call_site_and_fingerprint() -> None:
    here, again = thread_position(sys._getframe()), thread_position(sys._getframe())
    assert here.site.startswith("tests/runtime/test_health.py:")
    assert here.fingerprint != again.fingerprint
    assert not here.waits


def test_thread_in_a_collective_call_counts_as_waiting() -> None:
    seen = []

    class Work:
        def wait(self, timeout: object = None) -> None:
            seen.append(thread_position(sys._getframe()))

    watchdog = CollectiveWatchdog(rank=0, world_size=1, store=None, timeout_seconds=1)
    watchdog.wait(Work(), "gather", number=1)
    assert [place.waits for place in seen] == [True]


# -- slow ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "step_seconds", "slow"),
    [
        ([100, 100, 100, 130], 0.0002, {3: 1.3}),
        ([100, 100, 100, 115], 0.0002, {}),
        ([100, 200], 0.0003, {1: 2.0}),  # of two the faster one is the median
        ([100, 200, 100, 300], 0.0003, {1: 2.0, 3: 3.0}),
        ([100, 200], 0.1, {}),  # too small a share of the step
        ([0, 200, 0, 0], 0.0001, {}),  # no other rank to compare with
        ([0, 100, 100, 200], 0.0001, {3: 2.0}),
    ],
)
def test_slow_ranks_compares_own_times_with_the_median(
    times: list[int], step_seconds: float, slow: dict[int, float]
) -> None:
    assert slow_ranks(times, step_seconds) == slow


def test_slow_ranks_are_reported_when_confirmed_and_when_they_recover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    watch, own = StragglerWatch(run, 1), OwnTime(torch.device("cpu"), until_batch=False)
    own.step_seconds = 0.001
    for number, times in enumerate([[100, 300], [100, 100], [100, 300], [100, 310], [100, 320], [100, 100]]):
        own.record_all(number, times)
        watch.check(own)
        watch.check(own)
    lines = [line for line, _ in read_lines(run.stragglers(1))]
    assert [(line["step"], [slow["ratio"] for slow in line["slow"]]) for line in lines] == [(3, [3.1]), (5, [])]
    said = capsys.readouterr().out
    assert "step 3: rank 1 on an unknown node takes 3.1 times as long" in said
    assert "step 5: no rank is slow any more" in said


@pytest.mark.parametrize(("until_batch", "microseconds"), [(True, 2000), (False, 52_000)])
def test_own_time_ends_where_the_rank_may_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, until_batch: bool, microseconds: int
) -> None:
    """With sharded models when the batch has arrived, otherwise when the backward pass begins."""
    now = 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    own = OwnTime(torch.device("cpu"), until_batch=until_batch)
    for _ in range(4):
        own.step_is_over()
        now += 0.002
        own.batch_has_come()
        now += 0.05
        own.batch_has_come()  # another loader's
        own.backward_begins()
        now += 0.1
        own.backward_begins()  # of the next micro-batch
    assert own.take() == pytest.approx(microseconds, abs=1)
    assert own.step_seconds == pytest.approx(0.152)
    assert own.take() == 0


class Event:
    """An event of a GPU, one millisecond after the previous event. Only the first eight are complete."""

    count = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.count += 1
        self.number = Event.count

    def record(self) -> None:
        """Only the time of its creation counts."""

    def query(self) -> bool:
        return self.number <= 8

    def elapsed_time(self, other: Event) -> float:
        return float(other.number - self.number)


def test_own_time_on_a_gpu_is_measured_with_events_in_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    own = OwnTime(torch.device("cuda"), until_batch=False)
    for _ in range(5 * SAMPLE_STEPS):
        own.step_is_over()
        own.backward_begins()
        own.backward_begins()
    assert Event.count == 10
    assert own.take() == 1000


def test_step_that_ends_at_the_next_backward_pass_is_not_measured() -> None:
    own = OwnTime(torch.device("cpu"), until_batch=False)
    for _ in range(3):
        own.backward_begins()
        own.step_is_over()
        own.discard()
    assert own.take() == 0
