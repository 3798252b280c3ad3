"""Tests of what an overview says about a run that waits, trains or has failed: times, pace, risk, ranks, life."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.rank_records import Beat, Save, Timing
from hpcaccel.core.records import Hang, to_dict
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.run_overview import Overview, overview
from hpcaccel.view.run_tables import print_status

from .conftest import HandMade


def seen(run: HandMade, now: float, state: Any = "running", **facts: Any) -> Overview:
    status = RunStatus(run_id=run.run.run_id, name="gpt", state=state, **facts)
    return overview(run.run, status, now=now)


def shown(run: Overview) -> str:
    text = io.StringIO()
    print_status(run, stream=text)
    return " ".join(text.getvalue().split())


def beat(run: HandMade, attempt: int, rank: int, *, time: float, step: int = 10) -> None:
    line = Beat(
        rank=rank, host="n1", pid=1, number=1, time=time, interval_seconds=5.0, phase="training", step=step,
        step_seconds=0.5,
    )  # fmt: skip
    run.run.heartbeats(attempt).mkdir(exist_ok=True)
    write_json(run.run.heartbeats(attempt) / f"{rank}.json", to_dict(line))


@pytest.fixture
def training(hand_made: HandMade) -> HandMade:
    """A run whose only attempt began at 1000 and trains, half a second a step, since 1010; saved at step 100."""
    hand_made.start(1, allocated_at=996.0)
    hand_made.progress(1, total_steps=400)
    timing = Timing(
        process_started=1001.0, imported=1004.0, formed=1005.0, first_step_time=1010.5, last_step=140,
        last_step_time=1080.0, step_seconds=0.5, data_wait_seconds=13.9,
    )  # fmt: skip
    write_json(hand_made.run.timing(1), to_dict(timing))
    save = Save(step=100, reason="due", stall_seconds=2.0, seconds=2.0, bytes=10, time=1062.0)
    append_line(hand_made.run.saves(1), to_dict(save))
    checkpoint = hand_made.run.checkpoints / "step_00000100"
    checkpoint.mkdir()
    (checkpoint / "COMMITTED").write_text("{}")
    for step in range(100, 141, 10):
        hand_made.metric(step, attempt=1, time=1010.0 + step / 2, loss=5.0 - step / 100, tokens_per_second=2048.0)
    return hand_made


def test_running_run_has_pace_and_time_left(training):
    run = seen(training, now=1080.0, partition="gpu", deadline=1180.0)

    assert (run.steps_per_second, run.tokens_per_second, run.eta_seconds) == (2.0, 2048.0, 130.0)
    assert (run.deadline, run.time_left_seconds, run.partition, run.nodes) == (1180.0, 100.0, "gpu", ["n1"])
    assert run.data_wait_share == pytest.approx(0.2)
    assert run.loss_tail == [(step, 5.0 - step / 100) for step in range(100, 141, 10)]
    assert (run.started, run.ended, run.queued_since) == (1000.0, None, None)


def test_work_at_risk_is_steps_since_commit_and_restart(training):
    risk = seen(training, now=1080.0, deadline=1180.0).at_risk

    assert risk is not None
    assert (risk.commit_age_seconds, risk.steps_since_commit, risk.next_deadline) == (18.0, 40, 1180.0)
    assert risk.cost_seconds == 40 * 0.5 + 10.5
    assert risk.sentence == (
        "last checkpoint 18s ago at step 100; a failure now would cost 40 steps, 30s with the restart"
    )


def test_work_at_risk_without_checkpoint_begins_at_resumed_step(hand_made):
    hand_made.start(1)
    hand_made.progress(1, resumed_step=50)
    hand_made.metric(60, attempt=1, time=1010.0, loss=1.0)
    risk = seen(hand_made, now=1020.0).at_risk

    assert risk is not None
    assert (risk.commit_age_seconds, risk.steps_since_commit, risk.cost_seconds) == (None, 10, None)
    assert risk.sentence == "no checkpoint has been saved yet; a failure now would cost 10 steps"


def test_status_shows_pace_limit_and_risk(training):
    text = shown(seen(training, now=1080.0, deadline=1180.0))

    assert "pace 2 steps/s, 2048 tokens/s, 2m 10s left to the last step" in text
    assert "data wait 20.0 % of the time" in text
    assert "time limit 1m 40s left, until" in text
    assert "the last step will not be reached before" in text
    assert "at risk last checkpoint 18s ago at step 100" in text


def test_ended_run_has_neither_pace_nor_risk(training):
    training.end(1, time=1100.0, last_step=400, seconds=100.0)
    run = seen(training, now=5000.0, state="completed", deadline=None)

    assert (run.steps_per_second, run.eta_seconds, run.at_risk, run.time_left_seconds) == (None, None, None, None)
    assert run.ended == 1100.0
    assert run.goodput is not None
    assert {one.state for one in run.ranks} == {"ended"}


def test_pending_run_shows_estimated_start(hand_made):
    soon = seen(hand_made, now=1500.0, state="pending", detail="too many jobs", estimated_start=4e9)

    assert (soon.queued_since, soon.estimated_start, soon.at_risk) == (1000.0, 4e9, None)
    assert [(one.part, one.started, one.ended, one.text) for one in soon.life] == [
        ("queued", 1000.0, 1500.0, "too many jobs")
    ]
    assert "as Slurm estimates it" in shown(soon)
    assert seen(hand_made, now=1500.0, state="pending", estimated_start=1400.0).estimated_start is None


def test_silent_and_slow_ranks(training):
    beat(training, 1, 0, time=1079.0)
    beat(training, 1, 1, time=1040.0)
    append_line(training.run.stragglers(1), {"step": 120, "slow": [{"rank": 0, "node": "n1", "ratio": 2.0}]})
    run = seen(training, now=1080.0)

    assert [(one.rank, one.node, one.local_rank, one.state) for one in run.ranks] == [
        (0, "n1", 0, "slow"),
        (1, "n1", 1, "silent"),
    ]
    assert (run.ranks[0].ratio, run.ranks[0].step_seconds, run.ranks[1].step) == (2.0, 0.5, 10)
    assert "silent no heartbeats of rank 1 on n1" in shown(run)


def test_all_ranks_are_silent_if_their_heartbeats_are_old(training):
    for rank in (0, 1):
        beat(training, 1, rank, time=1040.0)

    assert {one.state for one in seen(training, now=1080.0).ranks} == {"ok"}
    assert {one.state for one in seen(training, now=1200.0).ranks} == {"silent"}


def test_damaged_heartbeat_and_more_ranks_than_recorded(training):
    beat(training, 1, 3, time=1079.0)
    (training.run.heartbeats(1) / "0.json").write_text("{")
    (training.run.heartbeats(1) / "2.json").write_text("[]")

    assert [(one.rank, one.step) for one in seen(training, now=1080.0).ranks] == [
        (0, None),
        (1, None),
        (2, None),
        (3, 10),
    ]


def test_hang_blames_its_rank_and_shows_in_life(training):
    beat(training, 1, 1, time=1079.0)
    hang = Hang(why="rank 1 has made no progress", culprit_rank=1, node="n1", time=1300.0)
    write_json(training.run.hang(1), to_dict(hang))
    training.end(1, reason="failed", error_class="hang", decision="requeue", seconds=400.0, checkpoint_step=100,
                 last_step=140, resumed_step=0)  # fmt: skip
    run = seen(training, now=1500.0, state="requeued")

    assert [one.state for one in run.ranks] == ["ended", "blamed"]
    parts = [(one.part, one.started, one.ended) for one in run.life]
    assert parts == [
        ("queued", 1000.0, 1000.0), ("starting", 1000.0, 1010.0), ("training", 1010.0, 1060.0),
        ("saving", 1060.0, 1062.0), ("lost", 1062.0, 1080.0), ("hung", 1080.0, 1400.0), ("queued", 1400.0, 1500.0),
    ][1:]  # fmt: skip
    assert run.life[-2].text.startswith("attempt 1 failed (hang)")
    assert run.life[3].text == "40 steps lost, steps 101 to 140"


def test_life_of_two_attempts_has_no_overlaps_and_says_how_each_ended(training):
    training.end(1, reason="preempted", decision="requeue", seconds=90.0, checkpoint_step=140, last_step=140,
                 detail="stopped at step 140, saved step_00000140")  # fmt: skip
    training.start(2, allocated_at=1500.0)
    training.progress(2, resumed_step=140)
    run = seen(training, now=2100.0)

    assert [one.part for one in run.life] == ["starting", "training", "saving", "training", "saving", "queued",
                                              "starting", "training"]  # fmt: skip
    assert all(one.ended <= other.started for one, other in pairwise(run.life))
    assert "preempted: stopped at step 140" in run.life[4].text
    assert (run.life[5].started, run.life[5].ended, run.life[5].attempt) == (1090.0, 1500.0, 2)
    assert run.life[-1].ended == 2100.0


def test_life_of_a_paused_run_has_a_pause_only_once_it_is_resumed(training):
    training.end(1, reason="stop", decision="pause", seconds=90.0, last_step=140, checkpoint_step=140)
    run = seen(training, now=2000.0, state="paused")

    assert (run.life[-1].part, run.life[-1].ended) == ("saving", 1090.0)
    training.start(2, queued_at=1700.0, allocated_at=1800.0)
    again = seen(training, now=2050.0)
    assert [(one.part, one.started, one.ended) for one in again.life][-4:-1] == [
        ("paused", 1090.0, 1700.0), ("queued", 1700.0, 1800.0), ("starting", 1800.0, 2000.0)
    ]  # fmt: skip


def test_overview_is_valid_json_with_infinite_values(training):
    training.metric(150, attempt=1, time=1085.0, loss=float("inf"), tokens_per_second=float("nan"))
    plain = seen(training, now=1090.0).to_json()

    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again["tokens_per_second"] is None
    assert len(again["loss_tail"]) == 5
    assert again["life"][0]["part"] == "starting"
    assert again["at_risk"]["steps_since_commit"] == 50
