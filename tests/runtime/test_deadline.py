"""Saves before a deadline: made if they fit, otherwise skipped with a message about the lost steps; step times."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.attempt_steps import read_steps
from hpcaccel.core.durable_files import append_line, read_json, write_json
from hpcaccel.core.process_identity import started_at
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.rank_logger import configure_training_log
from hpcaccel.runtime.settings import OutputLocation
from hpcaccel.runtime.training.attempt_timing import AttemptClock
from hpcaccel.runtime.training.process_exit import is_in_time, read_request
from hpcaccel.runtime.training.step_times import StepTimes
from tests.runtime.ranks import Ranks, make_run, outcome


def test_step_times_give_median_and_maximum_of_100_000_steps() -> None:
    times = StepTimes()
    for number in range(100_000):
        times.add(float(number % 101))
    assert times.largest == 100
    assert times.median == pytest.approx(50, abs=3)


def test_step_times_do_not_count_what_lies_between_steps() -> None:
    times = StepTimes()
    times.begin_at(100.0)
    for end in (101.0, 103.0, 104.0):
        times.end_at(end)
    times.begin_at(150.0)
    times.end_at(152.0)
    times.add(0.5)
    assert (times.largest, times.median, times.last_end) == (2.0, 1.0, 152.0)


def test_timing_file_contains_the_measured_times_and_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    started = started_at(os.getpid()) or 0.0
    clock = AttemptClock(run, 1, begun=started + 0.1, formed=started + 0.2)
    clock.prepared()
    clock.loaded(5)
    began = time.monotonic()
    for step in (6, 7, 8):
        clock.step_is_over(step)
        time.sleep(0.02)
    trained = time.monotonic()
    with clock.saving():
        time.sleep(0.05)
    saved = time.monotonic()
    with clock.waiting():
        time.sleep(0.05)
    waited = time.monotonic()
    clock.end()
    times = from_dict(Timing, read_json(run.timing(1)) or {})
    assert times.process_started is not None
    assert times.imported is not None
    assert times.formed is not None
    assert times.process_started < times.imported < times.formed <= (times.prepared or 0) <= (times.loaded or 0)
    assert (times.resumed_step, times.last_step, times.saves) == (5, 8, 1)
    # Bounds that were measured here, because a loaded machine sleeps longer.
    assert 0.02 <= (times.step_seconds or 0) <= trained - began
    assert 0.05 <= (times.slowest_save_seconds or 0) <= saved - trained
    assert (times.slowest_save_seconds or 0) + 0.05 <= times.stall_seconds <= waited - trained
    assert times.stall_after_last_step == times.stall_seconds
    later = AttemptClock(run, 2, begun=time.time(), formed=time.time())
    assert later.expected_save_seconds == times.slowest_save_seconds, "known from the attempt before"
    run.saves(2).parent.mkdir(parents=True, exist_ok=True)
    saves = [(70.0, 61.0, 500), (1.0, 0.0, 20), (1.5, 0.0, 20)]  # the last two linked what had not changed
    for seconds, waited_seconds, written in saves:
        line = {"seconds": seconds, "waited_seconds": waited_seconds, "bytes": 500, "written_bytes": written}
        append_line(run.saves(2), line)
    assert later.expected_save_seconds == 9.0, "a save at a stop does not wait, and writes everything"


def test_step_is_recorded_as_soon_as_it_is_done(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    clock = AttemptClock(run, 1, begun=time.time(), formed=time.time())
    clock.loaded(180)
    for step in range(181, 200):
        clock.step_is_over(step - 1)
        clock.count(step)
    assert (read_steps(run, 1).from_step, read_steps(run, 1).last_step) == (180, 199), "and nobody has ended the clock"


def test_load_after_the_first_step_does_not_change_from_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    clock = AttemptClock(run, 1, begun=time.time(), formed=time.time())
    for step in range(1, 101):
        clock.count(step)
        clock.step_is_over(step)
    clock.loaded(60)  # the best model, for a last evaluation
    clock.end()
    assert (read_steps(run, 1).from_step, read_steps(run, 1).last_step) == (0, 100)


def test_failed_write_of_step_times_is_logged_and_not_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_training_log(0)  # as the session does
    run = make_run(tmp_path / "run")
    run.attempts.rmdir()
    run.attempts.write_text("")
    clock = AttemptClock(run, 1, begun=time.time(), formed=time.time())
    clock.count(1)
    clock.step_is_over(1)
    assert "report will have no newer step times" in capsys.readouterr().out


def test_is_in_time_compares_the_save_time_with_the_deadline() -> None:
    def request(deadline: float | None) -> StopRequest:
        return StopRequest(reason="preempted", then="requeue", time=time.time(), deadline=deadline)

    now = time.time()
    assert is_in_time(request(None), 1000.0)
    assert is_in_time(request(now + 5), None)
    assert is_in_time(request(now + 5), 3.0)
    assert not is_in_time(request(now + 5), 7.0)


def supervised(run: RunDir) -> OutputLocation:
    run.lease.write_text("{}")
    run.attempt(1).mkdir()
    return OutputLocation(run=run, attempt=1)


def test_read_request_waits_for_the_stop_request_only_if_saves_are_slow(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    place = supervised(run)
    assert read_request(place, save_seconds=1.0) is None
    assert not run.signalled(1).exists(), "not worth asking"

    def answer() -> None:
        while not run.signalled(1).exists():
            time.sleep(0.02)
        write_json(run.stop(1), to_dict(StopRequest(reason="preempted", then="requeue", time=1.0, deadline=2.0)))

    thread = threading.Thread(target=answer)
    thread.start()
    found = read_request(place, save_seconds=60.0)
    thread.join()
    assert found is not None
    assert (found["reason"], found["deadline"]) == ("preempted", 2.0)


def test_two_ranks_exit_together_and_skip_a_save_that_cannot_finish(tmp_path: Path) -> None:
    """The measured save takes 2 s. 1 s is left in the first attempt, 60 s in the second."""
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 40})
    for attempt, left_seconds in ((1, 1.0), (2, 60.0)):
        ranks = Ranks("slow_to_save.py", size=2, run=run, attempt=attempt, blocked=True)
        _wait_for_step(run, attempt)
        deadline = time.time() + left_seconds
        request = StopRequest(reason="time_limit", then="requeue", time=time.time(), deadline=deadline)
        write_json(run.stop(attempt), to_dict(request))
        for process in ranks.processes:
            process.send_signal(signal.SIGUSR2)
        ended = ranks.wait()
        assert ended.codes == [85, 85], ended.outputs
        left = outcome(run, attempt)
        assert left is not None
        if attempt == 1:
            assert left["checkpoint"] == "step_00000040"
            assert left["step"] > 40
            assert f"Steps 41 to {left['step']} are lost and will be repeated from step_00000040" in ended.outputs[0]
        else:
            assert left["checkpoint"] == f"step_{left['step']:08d}"
            assert "resumed at step 40" in ended.outputs[0]


def _wait_for_step(run: RunDir, attempt: int) -> None:
    """Wait until the first save and some more steps are done."""
    end = time.monotonic() + 90
    while True:
        times = from_dict(Timing, read_json(run.timing(attempt)) or {})
        if times.saves and (times.last_step or 0) >= 40:
            time.sleep(0.2)
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def test_clock_records_the_time_spent_waiting_for_batches(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    loaders = LoadersInUse()
    clock = AttemptClock(
        run, 1, begun=time.time(), formed=time.time(), waited_for_data=loaders.waited_seconds
    )  # fmt: skip
    source: Any = object()
    for step in range(1, 4):
        loaders.requested_batch()
        time.sleep(0.02)
        loaders.took_batch_from(source)
        clock.step_is_over(step)
    clock.end()
    waited = from_dict(Timing, read_json(run.timing(1)) or {}).data_wait_seconds
    total = loaders.waited_seconds()
    assert waited is not None
    assert total is not None
    assert 0.04 <= waited <= total - 0.02, "since the first step"


def test_without_prepared_loader_the_wait_for_data_is_unknown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    clock = AttemptClock(
        run, 1, begun=time.time(), formed=time.time(), waited_for_data=LoadersInUse().waited_seconds
    )  # fmt: skip
    clock.step_is_over(1)
    clock.end()
    assert from_dict(Timing, read_json(run.timing(1)) or {}).data_wait_seconds is None
