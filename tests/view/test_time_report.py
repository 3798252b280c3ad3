"""Tests of ``hpcaccel report``, for a real run disturbed at known times and for run directories made by hand."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcaccel.core.durable_files import read_lines, write_json
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.report_table import interval_lines, print_report
from hpcaccel.view.time_report import Interval, TimeReport, report

from .conftest import HandMade

PROGRAM = Path(__file__).parent / "programs" / "disturbed.py"


class Disturbed:
    """The run, and the events that its script prints."""

    def __init__(self, folder: Path) -> None:
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        self.folder = folder
        spec: dict[str, Any] = {
            "name": "disturbed",
            "entrypoint": {"script": str(PROGRAM)},
            "environment": {"python": sys.executable},
            "slurm": {"nodes": 1, "ntasks_per_node": 1},
            "checkpoint": {"every_steps": 10},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(spec))
        self.dir = RunDir(json.loads(self.cli("submit", "job.yaml", "--cluster", "local", "--json"))["path"])

    def cli(self, *words: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "hpcaccel", *words]
        return subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=240, check=check
        ).stdout

    def said(self, attempt: int, what: str) -> list[dict[str, Any]]:
        return [line for line, _ in read_lines(self.dir.rank_log(attempt, 0)) if line.get("what") == what]

    def wait_for(self, attempt: int, what: str) -> None:
        end = time.monotonic() + 180
        while not self.said(attempt, what):
            assert time.monotonic() < end, self.dir.slurm_log.read_text()
            time.sleep(0.05)

    def ended(self, attempt: int) -> float:
        lines = [line for line, _ in read_lines(self.dir.ledger) if line["event"] == "end"]
        return float(lines[attempt - 1]["time"])

    def gaps(self, attempt: int) -> dict[int, float]:
        """Seconds of each step except an attempt's first: since the end of the previous step, without the save."""
        seconds: dict[int, float] = {}
        before, saving = 0.0, 0.0
        for line, _ in read_lines(self.dir.rank_log(attempt, 0)):
            if line.get("what") == "saved":
                saving += line["seconds"]
            elif line.get("what") == "step":
                if before:
                    seconds[line["step"]] = line["time"] - before - saving
                before, saving = line["time"], 0.0
        return seconds

    def one(self, attempt: int, what: str) -> float:
        return float(self.said(attempt, what)[0]["time"])

    def all(self, what: str) -> list[float]:
        return [line["seconds"] for attempt in (1, 2, 3) for line in self.said(attempt, what)]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """A run killed at step 35, stopped some steps after 44, resumed by hand 3 seconds later, and completed."""
    run = Disturbed(tmp_path_factory.mktemp("disturbed"))
    run.wait_for(2, "waits to be stopped")
    run.cli("stop", run.dir.run_id)
    run.cli("wait", run.dir.run_id, check=False)
    time.sleep(3.0)
    run.cli("resume", run.dir.run_id)
    run.cli("wait", run.dir.run_id)
    return run


@pytest.mark.chaos
def test_every_part_is_within_two_percent_of_the_injected_time(disturbed: Disturbed) -> None:
    """Expected times include delays caused by the machine, as they are computed from the gaps between steps."""
    run, told = disturbed, json.loads(disturbed.cli("report", disturbed.dir.run_id, "--json"))
    steps = {n: {line["step"]: line["time"] for line in run.said(n, "step")} for n in (1, 2, 3)}
    resumed = {n: min(steps[n]) - 1 for n in steps}
    stopped = max(steps[2])
    assert resumed == {1: 0, 2: 30, 3: stopped}
    assert sorted(step for n in steps for step in steps[n] if n > 1 or step <= 30) == list(range(1, 71))
    created = json.loads(run.dir.record.read_text())["created"]
    gaps = {n: run.gaps(n) for n in steps}
    # On a very busy machine more than half of the steps may be longer than the mean: none of them is slow then.
    typical = {n: min(statistics.median(gaps[n].values()), statistics.mean(gaps[n].values())) for n in steps}
    assert all(usual >= 0.05 for usual in typical.values())
    first_steps = sum(steps[n][resumed[n] + 1] - run.one(n, "loaded") - typical[n] for n in steps)
    # A step takes at least 0.05 s, and the first of an attempt at least 0.7 s more.
    assert first_steps + sum(typical.values()) >= 3 * (0.7 + 0.05)
    slow = sum(seconds - typical[n] for n in steps for seconds in gaps[n].values())
    training = 30 * typical[1] + len(steps[2]) * typical[2] + len(steps[3]) * typical[3]
    truth = {
        "training": training,
        "slow": slow,
        "lost": 5 * typical[1],
        "stall": sum(run.all("saved")) + 1.2,  # not printed: the saves at the stop and after the loop
        "build": sum(run.one(n, "prepared") - run.one(n, "formed") for n in steps),
        "load": sum(run.one(n, "loaded") - run.one(n, "prepared") for n in steps),
        "first_step": first_steps,
        "hang": run.one(1, "killed") - run.said(1, "step")[-1]["time"],
    }
    total = run.ended(3) - created
    assert told["total_seconds"] == pytest.approx(total, abs=0.2)
    assert sum(told["seconds"].values()) == pytest.approx(told["total_seconds"])
    for attempt in told["attempts"]:
        assert sum(attempt["seconds"].values()) > 0
    assert told["seconds"]["paused"] >= 3.0
    downtime = total - told["seconds"]["paused"] - truth["training"]
    left = {1: created, 2: run.ended(1), 3: run.ended(2)}
    starting = sum(told["seconds"][part] for part in ("queue", "paused", "launch", "imports"))
    assert starting == pytest.approx(sum(run.one(n, "imported") - left[n] for n in steps), abs=0.02 * downtime)
    assert told["seconds"]["imports"] >= sum(run.one(n, "imported") - run.one(n, "begun") for n in steps) >= 3
    wrong = {part: (told["seconds"][part], true) for part, true in truth.items()
             if abs(told["seconds"][part] - true) > 0.02 * downtime}  # fmt: skip
    assert not wrong, (downtime, told["seconds"])
    ratio = truth["training"] / (total - told["seconds"]["paused"])
    assert told["ettr"] == pytest.approx(ratio, abs=0.02)
    assert told["steps"] == 70
    ends = [line for line, _ in read_lines(run.dir.ledger) if line["event"] == "end"]
    assert [(end["resumed_step"], end["last_step"]) for end in ends] == [(0, 35), (30, stopped), (stopped, 70)]
    status = json.loads(run.cli("status", run.dir.run_id, "--json"))
    assert told["steps_lost"] == status["steps_lost"] == 5
    assert [one["steps_lost"] for one in told["attempts"]] == [5, 0, 0]
    timings = [json.loads(run.dir.timing(attempt).read_text()) for attempt in (1, 2, 3)]
    assert [timing["resumed_step"] for timing in timings] == [0, 30, stopped]


@pytest.mark.chaos
def test_report_and_status_text_show_goodput(disturbed: Disturbed) -> None:
    text = disturbed.cli("report", disturbed.dir.run_id)
    for word in ("effective training time (ETTR)", "goodput", "steps: 70", "paused", "checkpoint interval: every"):
        assert word in text, text
    ended = [line.split() for line in text.splitlines() if line.startswith("ended")]
    assert ended == [["ended", "failed", "stop", "completed"]]
    status = disturbed.cli("status", disturbed.dir.run_id)
    assert "% of the time with allocated nodes" in status, status


# -- run directories made by hand --------------------------------------------------------------------------------------


def gather(made: HandMade, *, state: str = "running", now: float = 1400.0) -> TimeReport:
    status = RunStatus(run_id="r", name="gpt", state=state, attempts=1)  # type: ignore[arg-type]
    told = report(made.run, status, now=now)
    assert told.total_seconds == pytest.approx(sum(told.seconds.values()))
    return told


def test_time_of_pending_run_is_all_queue(hand_made: HandMade) -> None:
    told = gather(hand_made, state="pending")
    assert {part: value for part, value in told.seconds.items() if value} == {"queue": 400.0}
    assert (told.ettr, told.goodput, told.interval) == (0.0, None, None)


def test_current_step_of_running_attempt_counts_as_training(hand_made: HandMade) -> None:
    hand_made.start(1, allocated_at=1000.0)  # at 1000 s, which is when the run was submitted
    times = Timing(
        process_started=1010, imported=1020, formed=1025, prepared=1050, loaded=1050, first_step_time=1100,
        last_step=11, last_step_time=1300, step_seconds=20,
    )  # fmt: skip
    write_json(hand_made.run.timing(1), to_dict(times))
    told = gather(hand_made)
    assert told.seconds["training"] == 11 * 20 + 100, "the step that it is in counts as long as it goes on"
    assert told.seconds["first_step"] == 30
    assert told.ettr == told.goodput == pytest.approx(320 / 400)
    assert "running" not in str(told.attempts[0].reason)


def test_time_after_a_requeue_is_queue(hand_made: HandMade) -> None:
    hand_made.start(1)
    hand_made.end(1, reason="preempted", decision="requeue", seconds=100.0)
    told = gather(hand_made, state="requeued")
    assert told.seconds["queue"] == 300
    assert told.seconds["untold"] == 100


def test_times_of_array_tasks_are_added_up(hand_made: HandMade, tmp_path: Path) -> None:
    (hand_made.run.path / "tasks").mkdir()
    tasks = [HandMade(hand_made.run.task(index).path) for index in (0, 1)]
    tasks[0].start(1)
    tasks[0].end(1, seconds=250.0)
    states = [
        RunStatus(run_id=f"r_{index}", name="gpt", state=state)  # type: ignore[arg-type]
        for index, state in enumerate(["completed", "pending"])
    ]
    status = RunStatus(run_id="r", name="gpt", state="pending", tasks=tuple(states))
    told = report(hand_made.run, status, now=1400.0)
    assert [task.run_id for task in told.tasks] == ["r_0", "r_1"]
    assert {part: value for part, value in told.seconds.items() if value} == {"queue": 400.0, "untold": 250.0}
    assert told.total_seconds == told.to_json()["total_seconds"] == 650


def test_printed_report_of_tasks_escapes_the_name(hand_made: HandMade, capsys: pytest.CaptureFixture[str]) -> None:
    hand_made.start(1)
    told = gather(hand_made)
    both = TimeReport(
        run_id="r", name="gpt\x1b[2J", state="running", seconds=told.seconds, steps=0, steps_lost=0, tasks=[told, told]
    )
    print_report(both)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "effective training time (ETTR): 0.0 %" in out
    json.dumps(both.to_json())


def interval(**facts: Any) -> Interval:
    usual = {
        "saves": 10, "save_cost_seconds": 2.0, "interruptions": 3, "seconds_between_interruptions": 3600.0,
        "step_seconds": 0.5, "suggested_seconds": 120.0, "suggested_steps": 240, "present_seconds": 120.0,
    }  # fmt: skip
    return Interval(**{**usual, **facts})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"suggested_seconds": None, "seconds_between_interruptions": None}, "this run was never interrupted"),
        ({"present_seconds": 12.0}, "far too often, every 24 steps"),
        ({"present_seconds": 1200.0}, "far too rarely, every 2400 steps"),
        ({"present_seconds": None}, "this run saves only when it stops or ends"),
        ({}, "every 240 steps (2m 00s) costs least, 3.3 % of the time"),
    ],
)
def test_interval_lines_suggest_how_often_to_save(facts: dict[str, Any], words: str) -> None:
    assert words in "\n".join(interval_lines(interval(**facts)))
    assert interval(**facts).far_off is ("far too" in words or "stops or ends" in words)
