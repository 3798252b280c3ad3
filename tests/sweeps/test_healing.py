"""Tuner: trials still written by another process, killed tuners, larger budgets, and a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.sweep_dir import SweepDir
from tests.sweeps.hosting import FakeHost, make_sweep, read, trials
from tests.sweeps.test_tuner import eventually, spend

pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("hosts_end")


def test_trial_still_written_by_another_process_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.next_trial.BUSY_SECONDS", 1.5)
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    host = FakeHost(sweep)
    number = host.hear()["run"]
    for _ in range(2):  # more often than the retries allow
        host.ended(number, "failed", error_class="busy", detail="it is being written by job 7")
        other = host.hear()["run"]
        if other != number:  # meanwhile another trial runs
            host.trial(other).log(10, loss=2.0)
            host.ended(other, "completed")
            assert host.hear()["run"] == number
    host.trial(number).log(10, loss=1.0)
    host.ended(number, "completed")
    assert host.hear()["end"]
    assert sorted(trial.values or [] for trial in trials(sweep, "complete")) == [[1.0], [2.0]]


def test_worker_stops_waiting_for_a_trial_written_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.next_trial.MOST_SECONDS", 0.0)
    sweep = make_sweep(tmp_path, "sweep.max_trials=1")
    host = FakeHost(sweep)
    host.play(None, reason="failed", error_class="busy", detail="it is being written by job 7")
    assert host.hear()["end"]
    assert len(trials(sweep, "running")) == 1


def test_workers_with_a_recent_heartbeat_are_also_checked_in_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ASK_SECONDS", "ASK_SECONDS_EACH"):
        monkeypatch.setattr(f"hpcaccel.sweeps.next_trial.{name}", 0.1)
    sweep = make_sweep(tmp_path, "sweep.max_trials=9")
    killed = FakeHost(sweep, 0)
    number = killed.hear()["run"]
    killed.hang_up()
    host = FakeHost(sweep, 1)
    first = host.hear()["run"]
    assert first != number
    eventually(lambda: trials(sweep, "waiting"))
    asked: list[set[int]] = []

    def dead_ones(_: object, workers: set[int], __: object) -> set[int]:
        asked.append(workers)
        return workers

    monkeypatch.setattr("hpcaccel.sweeps.next_trial.gone_for_good", dead_ones)
    eventually(lambda: asked)
    host.trial(first).log(10, loss=1.0)
    host.ended(first, "completed")
    assert host.hear()["run"] == number
    host.hang_up()


def stopped_by_its_budget(sweep: SweepDir, *, gpu_hours: float) -> int:
    """Let the tuner request a trial to stop, and exit before the trial ends. Returns the trial's number."""
    host = FakeHost(sweep)
    number = int(host.hear()["run"])
    played = host.trial(number)
    played.begin()
    played.save(10)
    played.log(10, loss=2.0)
    spend(sweep, 9, gpu_seconds=gpu_hours * 3600)
    eventually(lambda: played.requests)
    host.hang_up()
    return number


@pytest.mark.parametrize("larger", [False, True])
def test_trial_stopped_for_the_budget_can_continue_after_a_lost_tuner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, larger: bool
) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.budget.READ_SECONDS", 0.1)
    sweep = make_sweep(tmp_path, "sweep.max_gpu_hours=1", "sweep.max_trials=1")
    number = stopped_by_its_budget(sweep, gpu_hours=1)
    if larger:  # the trial's end is recorded only after a resume
        document = read_json(sweep.sweep)
        assert document is not None
        write_json(sweep.sweep, {**document, "sweep": {**document["sweep"], "max_gpu_hours": 9.0}})
    host = FakeHost(sweep, running={} if larger else {"0": number})
    if larger:
        assert host.hear()["run"] == number
    host.ended(number, "pruned")
    said = host.hear()
    if not larger:
        assert "max_gpu_hours is 1" in said["why"]
    (pruned,) = trials(sweep, "pruned")
    assert pruned.user_attrs["error_class"] == "budget"
    checkpoint = sweep.trial(number).checkpoints / checkpoint_files.checkpoint_name(10)
    assert checkpoint.exists()
    if larger:
        after = said["run"]
        assert after != number
        assert host.trial(after).spec["spec"]["checkpoint"]["resume"] == str(checkpoint)
        assert (checkpoint / checkpoint_files.PINNED).exists()
        host.trial(after).log(20, loss=1.0)
        host.ended(after, "completed")
        assert host.hear()["end"]
        eventually(lambda: not checkpoint.exists())  # no trial needs it any more
        assert [trial.state for trial in read(sweep).trials] == ["pruned", "complete"]


def test_full_disk_at_trial_start_ends_the_worker_but_not_the_trial(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    host = FakeHost(sweep)
    number = host.play(None, reason="failed", error_class="disk", detail="cannot write x: No space left on device")
    why = host.hear()["why"]
    said = (
        "trial 0: cannot write x: No space left on device. Free some space or make the directory writable, then run: "
        "hpcaccel sweep"
    )
    assert f"{said} resume" in why
    assert [trial.number for trial in trials(sweep, "running")] == [number]
