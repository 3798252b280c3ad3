"""The chooser: which trial runs next, when one ends early, what the study is told, and what a kill leaves behind."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import WorkerEnd, to_dict
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError
from tests.sweeps.hosting import FakeHost, make_sweep, owner, read, trials

pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("hosts_end")


def test_trial_after_trial_until_all_have_begun(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.keep_checkpoints=1")
    host = FakeHost(sweep)
    for loss in (3.0, 1.0, 2.0):
        played = host.trial(host.hear()["run"])
        played.log(10, loss=loss + 1)
        played.log(20, loss=loss)
        played.save(20)
        host.ended(played.number, "completed")
    end = host.hear()
    assert "all trials that max_trials (3) allows have been started" in end["why"]
    assert [trial.values for trial in read(sweep).trials] == [[3.0], [1.0], [2.0]]
    assert read(sweep).trials[0].params == {"args.lr": 0.5}  # the spec's own values come first
    marks = read(sweep).trials[0].user_attrs
    assert (marks["gpu_seconds"], marks["steps"], marks["attempts"]) == (2.0, 20, 1)
    kept = [len(checkpoint_files.committed(sweep.trial(number).checkpoints)) for number in range(3)]
    assert kept == [0, 1, 0]
    assert owner(sweep, 0) == 0
    assert host.hear() == {}


def test_a_trials_directory_is_a_run_with_the_values_of_its_point(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    host = FakeHost(sweep)
    host.play(1.0)
    number = host.hear()["run"]
    lr = read(sweep).trials[number].params["args.lr"]
    document = host.trial(number).spec
    assert document["spec"]["entrypoint"]["args"]["lr"] == lr
    assert document["launch"]["program"][-2:] == ["--lr", str(lr)]
    assert sweep.trial(number).node_program == sweep.node_program
    host.hang_up()


def test_a_killed_chooser_is_followed_by_one_that_goes_on_with_its_trial(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    first = FakeHost(sweep, process=True)
    number = first.hear()["run"]
    first.trial(number).log(10, loss=3.0)
    assert first.process is not None
    first.process.kill()
    first.process.wait()
    # The host's own: the trial still runs, and is not started again.
    second = FakeHost(sweep, process=True, running={"0": number})
    second.trial(number).log(20, loss=2.0)
    second.ended(number, "completed")
    # One that the whole worker was killed with: the same trial, once more.
    other = second.hear()["run"]
    assert other != number
    assert second.process is not None
    second.process.kill()
    second.process.wait()
    third = FakeHost(sweep)
    assert third.play(1.0) == other
    assert third.hear()["end"]
    assert [trial.values for trial in trials(sweep, "complete")] == [[2.0], [1.0]]


def test_going_on_with_a_trial_does_not_wait_for_optuna() -> None:
    code = "import sys, hpcaccel.sweeps.tuner; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"optuna", "numpy", "torch"}.isdisjoint(loaded)


def test_a_dead_workers_trial_is_taken_over_and_a_waiting_ones_is_not(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2", "sweep.workers=3")
    hosts = [FakeHost(sweep, index, process=True) for index in (0, 1)]
    numbers = [host.hear()["run"] for host in hosts]
    for host in hosts:
        assert host.process is not None
        host.process.kill()
        host.process.wait()
    # By its own process worker 1 is dead; of worker 0 the same is not known.
    dead = {"job_id": "local-1_1", "host": os.uname().nodename, "pid": hosts[1].process.pid, "pid_start": 1}  # type: ignore[union-attr]
    write_json(sweep.worker(1).local_process, dead)
    write_json(sweep.worker(0).local_process, {**dead, "host": "elsewhere"})
    third = FakeHost(sweep, 2)
    assert third.play(1.0) == numbers[1]
    assert "have begun" in third.hear()["why"]
    assert (owner(sweep, numbers[0]), owner(sweep, numbers[1])) == (0, 2)
    assert [trial.number for trial in trials(sweep, "running")] == [numbers[0]]


def test_silent_workers_are_asked_about_while_trials_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.budget.FRESH_SECONDS", 0)
    sweep = make_sweep(tmp_path, "sweep.max_trials=9")
    lost = FakeHost(sweep, 0)
    number = lost.hear()["run"]
    lost.hang_up()
    dead = {"job_id": "local-1_0", "host": os.uname().nodename, "pid": os.getpid(), "pid_start": 1}
    write_json(sweep.worker(0).local_process, dead)
    host = FakeHost(sweep, 1)
    first = host.hear()["run"]
    assert first != number
    eventually(lambda: len(trials(sweep, "waiting")) == 1)  # by then it has looked around
    host.trial(first).log(10, loss=1.0)
    host.ended(first, "completed")
    assert host.hear()["run"] == number
    host.hang_up()


def test_a_worker_that_comes_back_lets_go_what_another_one_has_taken(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=1")
    host = FakeHost(sweep)
    number = host.hear()["run"]
    with sweep.journal.open("a") as journal:
        journal.write('{"hpcaccel":"claim","trial":0,"worker":1,"epoch":2,"token":"another"}\n')
    host.trial(number).log(10, loss=1.0)
    host.ended(number, "completed")
    assert host.hear()["end"]
    assert trials(sweep, "complete") == []


def test_a_failed_trial_is_tried_again_and_then_another_one(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.retries=1", "sweep.max_trials=2")
    host = FakeHost(sweep)
    first = host.play(None, reason="failed", error_class="out_of_memory", detail="CUDA out of memory")
    assert host.play(None, reason="failed", error_class="out_of_memory", detail="CUDA out of memory") == first
    assert host.play(1.0) != first
    assert host.hear()["end"]
    (failed,) = trials(sweep, "failed")
    assert failed.user_attrs["error_class"] == "out_of_memory"
    assert failed.user_attrs["detail"] == "CUDA out of memory"
    assert failed.user_attrs["attempts"] == 2


def test_trials_that_all_fail_alike_from_the_first_on_stop_the_sweep_until_it_is_resumed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=20")
    host = FakeHost(sweep)
    for _ in range(5):
        host.play(None, reason="failed", error_class="import", detail="ModuleNotFoundError: no module named 'nump'")
    assert "the first 5 trials all failed (import): ModuleNotFoundError" in host.hear()["why"]
    assert "all failed" in FakeHost(sweep).hear()["why"]
    with sweep.journal.open("a") as journal:
        journal.write(json.dumps({"hpcaccel": "resume", "time": time.time()}) + "\n")
    again = FakeHost(sweep)
    again.play(None, reason="failed", error_class="import")  # what was before is forgiven
    assert "run" in again.hear()
    again.hang_up()


def test_one_trial_that_works_is_hope_enough(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=8")
    host = FakeHost(sweep)
    host.play(1.0)
    for _ in range(7):
        host.play(None, reason="failed", error_class="import")
    assert "have begun" in host.hear()["why"]


def test_a_metric_that_no_trial_logs_stops_the_sweep_and_says_what_was_logged(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=20")
    host = FakeHost(sweep)
    for _ in range(3):
        played = host.trial(host.hear()["run"])
        played.log(10, train_loss=1.0, acc=0.5)
        host.ended(played.number, "completed")
    why = host.hear()["why"]
    assert "metric 'loss' was never logged; the trial logged: acc, train_loss" in why


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_trial_that_diverges_has_failed_and_is_not_tried_again(tmp_path: Path, value: float) -> None:
    sweep = make_sweep(tmp_path, "sweep.retries=3", "sweep.max_trials=2")
    host = FakeHost(sweep)
    first = host.play(value)
    assert host.play(1.0) != first
    assert host.hear()["end"]
    assert trials(sweep, "failed")[0].user_attrs["error_class"] == "diverged"


def test_a_trial_that_does_badly_at_a_rung_is_asked_to_end_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.pruner={asha: {min_steps: 10, reduction_factor: 2}}", "sweep.max_trials=3")
    host = FakeHost(sweep)
    for loss in (1.0, 2.0):
        host.play(loss, step=10)
    played = host.trial(host.hear()["run"])
    played.save(10)
    played.log(12, loss=3.0)
    eventually(lambda: played.requests)
    (request,) = played.requests
    assert (request["reason"], request["then"]) == ("pruned", "finish")
    host.ended(played.number, "pruned")
    assert host.hear()["end"]
    (pruned,) = trials(sweep, "pruned")
    assert pruned.values == [3.0]
    assert "it was ranked 3 of 3" in pruned.user_attrs["detail"]
    assert list(played.run.checkpoints.iterdir()) == []


def test_places_side_by_side_and_seeds_of_one_point(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.repeat=2", "sweep.max_trials=4", "sweep.pack=2")
    host = FakeHost(sweep, slots=2, gpus=4)
    first, second = host.hear(), host.hear()
    assert {first["slot"], second["slot"]} == {0, 1}
    seeds = {host.trial(message["run"]).spec["spec"]["runtime"]["seed"] for message in (first, second)}
    assert seeds == {0, 1}
    host.trial(second["run"]).log(1, loss=1.0)
    host.ended(second["run"], "completed")
    assert host.hear()["slot"] == second["slot"]
    assert trials(sweep, "complete")[0].user_attrs["gpu_seconds"] == 4.0  # two seconds on two of the GPUs
    host.hang_up()


def test_an_empty_place_does_not_ask_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    other = FakeHost(sweep, 1)
    other.hear()
    asked: list[float] = []

    def nobody(_: object, workers: set[int], *__: object, **___: object) -> set[int]:
        if 1 in workers:  # worker 0's query; worker 1 makes one of its own every 15 s
            asked.append(time.time())
        return set()

    monkeypatch.setattr("hpcaccel.sweeps.next_trial.gone_for_good", nobody)
    host = FakeHost(sweep, slots=2)
    number = host.hear()["run"]
    eventually(lambda: asked)
    assert host.silent(2)
    assert len(asked) == 1
    host.trial(number).log(10, loss=1.0)
    host.ended(number, "completed")
    assert "have begun" in host.hear()["why"]
    other.hang_up()


def test_while_a_trial_runs_the_next_one_is_drawn_and_waits_for_whoever_is_free(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    host = FakeHost(sweep)
    running = host.hear()["run"]
    eventually(lambda: trials(sweep, "waiting"))
    (waiting,) = trials(sweep, "waiting")
    assert sweep.trial(waiting.number).spec.exists()
    other = FakeHost(sweep, 1)
    assert other.play(1.0) == waiting.number
    assert "have begun" in other.hear()["why"]
    assert read(sweep).trials[waiting.number].params == waiting.params
    host.trial(running).log(10, loss=2.0)
    host.ended(running, "completed")
    assert host.hear()["end"]


def test_when_the_host_stops_nothing_new_starts_and_the_trial_stays_with_its_worker(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    host = FakeHost(sweep)
    number = host.hear()["run"]
    host.say({"event": "stopping", "reason": "preempted", "then": "requeue"})
    host.ended(number, "preempted", "requeue")
    assert host.silent()
    host.hang_up()
    back = FakeHost(sweep)
    assert back.hear()["run"] == number
    back.hang_up()


def test_a_trial_whose_supervisor_was_killed_goes_on_and_not_for_ever(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=1")
    host = FakeHost(sweep)
    numbers = {host.play(None, reason="lost", decision="requeue", detail="killed by signal 9") for _ in range(4)}
    assert len(numbers) == 1
    assert host.hear()["end"]
    assert "killed by signal 9 (4 times)" in trials(sweep, "failed")[0].user_attrs["detail"]


def test_a_budget_that_is_used_up_ends_what_runs_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.budget.READ_SECONDS", 0.1)
    sweep = make_sweep(tmp_path, "sweep.max_gpu_hours=1")
    host = FakeHost(sweep)
    number = host.hear()["run"]
    played = host.trial(number)
    played.begin()
    played.save(10)
    played.log(10, loss=2.0)
    write_json(played.run.progress(1), {"resumed_step": 0, "total_steps": 40})
    spend(sweep, 9, gpu_seconds=3600)
    eventually(lambda: played.requests)
    host.ended(number, "pruned")
    why = host.hear()["why"]
    assert "max_gpu_hours is 1, which is too little for one trial" in why
    (pruned,) = trials(sweep, "pruned")
    assert pruned.values == [2.0]
    assert "too little for one trial: trial 0 has used" in pruned.user_attrs["detail"]
    assert "for 10 of 40 steps" in pruned.user_attrs["detail"]
    assert len(checkpoint_files.committed(played.run.checkpoints)) == 1  # with a larger budget it can go on


def test_a_budget_that_is_used_up_before_any_trial_says_how_to_raise_it(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_gpu_hours=1")
    spend(sweep, 9, gpu_seconds=3600)
    why = FakeHost(sweep).hear()["why"]
    assert "1 GPU-hours were used before the first trial started" in why
    assert "sweep.max_gpu_hours=" in why


def spend(sweep: SweepDir, worker: int, *, gpu_seconds: float) -> None:
    sweep.worker(worker).prepare()
    account = sweep.worker(worker).account
    append_line(account, {"event": "start", "time": 1000.0, "job_id": "46_9", "gpus": 1})
    append_line(account, to_dict(WorkerEnd(time=1000.0 + gpu_seconds, reason="completed", decision="end")))


def test_without_time_for_another_trial_the_worker_comes_back_with_fresh_time(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    host = FakeHost(sweep, end_time=time.time() + 100)
    number = host.hear()["run"]
    played = host.trial(number)
    played.log(10, loss=1.0)
    played.begin()
    write_json(played.run.timing(1), {"first_step_time": time.time() + 400})
    host.ended(number, "completed")
    end = host.hear()
    assert "too short" in end["why"]
    assert end["then"] == "requeue"


def test_a_full_disk_ends_the_chooser_with_a_message_and_loses_nothing(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    host = FakeHost(sweep, process=True)
    number = host.hear()["run"]
    eventually(lambda: trials(sweep, "waiting"))
    assert host.process is not None
    limit = sweep.journal.stat().st_size
    resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    host.trial(number).log(10, loss=1.0)
    host.ended(number, "completed")
    assert host.hear() == {}
    assert host.process.wait(20) == RunDirectoryError.exit_code
    assert "cannot write to the sweep's journal" in host.log.read_text()
    again = FakeHost(sweep)
    assert again.hear()["run"] == number
    again.ended(number, "completed")  # its supervisor knows that it is done
    again.play(2.0)
    assert again.hear()["end"]
    assert [trial.values for trial in trials(sweep, "complete")] == [[1.0], [2.0]]


def test_the_chooser_leaves_when_its_host_is_gone(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    host = FakeHost(sweep, process=True)
    number = host.hear()["run"]
    host.hang_up()
    assert host.process is not None
    assert host.process.wait(20) == 0
    assert [trial.number for trial in trials(sweep, "running")] == [number]


def eventually(question: Callable[[], object], *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
