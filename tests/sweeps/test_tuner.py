"""The tuner: trial selection, pruning, results in the study, and recovery after kills."""

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


def test_tuner_runs_max_trials_and_keeps_the_best_checkpoint(tmp_path: Path) -> None:
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


def test_trial_directory_is_a_run_with_the_parameters_of_its_point(tmp_path: Path) -> None:
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


def test_restarted_tuner_continues_the_trial_of_the_killed_tuner(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    first = FakeHost(sweep, process=True)
    number = first.hear()["run"]
    first.trial(number).log(10, loss=3.0)
    assert first.process is not None
    first.process.kill()
    first.process.wait()
    # Only the tuner was killed: its trial still runs and is not started again.
    second = FakeHost(sweep, process=True, running={"0": number})
    second.trial(number).log(20, loss=2.0)
    second.ended(number, "completed")
    # The whole worker was killed: the same trial is started again.
    other = second.hear()["run"]
    assert other != number
    assert second.process is not None
    second.process.kill()
    second.process.wait()
    third = FakeHost(sweep)
    assert third.play(1.0) == other
    assert third.hear()["end"]
    assert [trial.values for trial in trials(sweep, "complete")] == [[2.0], [1.0]]


def test_importing_the_tuner_does_not_import_optuna() -> None:
    code = "import sys, hpcaccel.sweeps.tuner; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"optuna", "numpy", "torch"}.isdisjoint(loaded)


def test_only_the_trial_of_a_worker_known_to_be_dead_is_taken_over(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2", "sweep.workers=3")
    hosts = [FakeHost(sweep, index, process=True) for index in (0, 1)]
    numbers = [host.hear()["run"] for host in hosts]
    for host in hosts:
        assert host.process is not None
        host.process.kill()
        host.process.wait()
    # Worker 1's process is known to be dead; worker 0 is on another host, so its state is unknown.
    dead = {"job_id": "local-1_1", "host": os.uname().nodename, "pid": hosts[1].process.pid, "pid_start": 1}  # type: ignore[union-attr]
    write_json(sweep.worker(1).local_process, dead)
    write_json(sweep.worker(0).local_process, {**dead, "host": "elsewhere"})
    third = FakeHost(sweep, 2)
    assert third.play(1.0) == numbers[1]
    assert "have been started" in third.hear()["why"]
    assert (owner(sweep, numbers[0]), owner(sweep, numbers[1])) == (0, 2)
    assert [trial.number for trial in trials(sweep, "running")] == [numbers[0]]


def test_trial_of_a_dead_worker_without_a_heartbeat_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcaccel.sweeps.compute_account.FRESH_SECONDS", 0)
    sweep = make_sweep(tmp_path, "sweep.max_trials=9")
    lost = FakeHost(sweep, 0)
    number = lost.hear()["run"]
    lost.hang_up()
    dead = {"job_id": "local-1_0", "host": os.uname().nodename, "pid": os.getpid(), "pid_start": 1}
    write_json(sweep.worker(0).local_process, dead)
    host = FakeHost(sweep, 1)
    first = host.hear()["run"]
    assert first != number
    eventually(lambda: len(trials(sweep, "waiting")) == 1)  # by then it has checked for dead workers
    host.trial(first).log(10, loss=1.0)
    host.ended(first, "completed")
    assert host.hear()["run"] == number
    host.hang_up()


def test_worker_drops_the_result_of_a_trial_that_another_worker_claimed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=1")
    host = FakeHost(sweep)
    number = host.hear()["run"]
    with sweep.journal.open("a") as journal:
        journal.write('{"hpcaccel":"claim","trial":0,"worker":1,"epoch":2,"token":"another"}\n')
    host.trial(number).log(10, loss=1.0)
    host.ended(number, "completed")
    assert host.hear()["end"]
    assert trials(sweep, "complete") == []


def test_failed_trial_is_retried_before_the_next_trial_starts(tmp_path: Path) -> None:
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


def test_equal_failures_of_the_first_trials_halt_the_sweep_until_resumed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=20")
    host = FakeHost(sweep)
    for _ in range(5):
        host.play(None, reason="failed", error_class="import", detail="ModuleNotFoundError: no module named 'nump'")
    assert "the first 5 trials all failed (import): ModuleNotFoundError" in host.hear()["why"]
    assert "all failed" in FakeHost(sweep).hear()["why"]
    with sweep.journal.open("a") as journal:
        journal.write(json.dumps({"hpcaccel": "resume", "time": time.time()}) + "\n")
    again = FakeHost(sweep)
    again.play(None, reason="failed", error_class="import")  # earlier failures no longer count
    assert "run" in again.hear()
    again.hang_up()


def test_one_complete_trial_prevents_the_halt(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=8")
    host = FakeHost(sweep)
    host.play(1.0)
    for _ in range(7):
        host.play(None, reason="failed", error_class="import")
    assert "have been started" in host.hear()["why"]


def test_metric_that_no_trial_logs_halts_the_sweep(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=20")
    host = FakeHost(sweep)
    for _ in range(3):
        played = host.trial(host.hear()["run"])
        played.log(10, train_loss=1.0, acc=0.5)
        host.ended(played.number, "completed")
    why = host.hear()["why"]
    assert "metric 'loss' was never logged; the trial logged: acc, train_loss" in why


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_diverged_trial_fails_without_a_retry(tmp_path: Path, value: float) -> None:
    sweep = make_sweep(tmp_path, "sweep.retries=3", "sweep.max_trials=2")
    host = FakeHost(sweep)
    first = host.play(value)
    assert host.play(1.0) != first
    assert host.hear()["end"]
    assert trials(sweep, "failed")[0].user_attrs["error_class"] == "diverged"


def test_pruned_trial_gets_a_stop_request_and_keeps_no_checkpoint(tmp_path: Path) -> None:
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


def test_packed_trials_use_separate_slots_and_seeds(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.repeat=2", "sweep.max_trials=4", "sweep.pack=2")
    host = FakeHost(sweep, slots=2, gpus=4)
    first, second = host.hear(), host.hear()
    assert {first["slot"], second["slot"]} == {0, 1}
    seeds = {host.trial(message["run"]).spec["spec"]["runtime"]["seed"] for message in (first, second)}
    assert seeds == {0, 1}
    host.trial(second["run"]).log(1, loss=1.0)
    host.ended(second["run"], "completed")
    assert host.hear()["slot"] == second["slot"]
    assert trials(sweep, "complete")[0].user_attrs["gpu_seconds"] == 4.0  # two seconds on two GPUs
    host.hang_up()


def test_empty_slot_does_not_query_dead_workers_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "have been started" in host.hear()["why"]
    other.hang_up()


def test_next_trial_is_drawn_ahead_and_taken_by_the_first_free_worker(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=2")
    host = FakeHost(sweep)
    running = host.hear()["run"]
    eventually(lambda: trials(sweep, "waiting"))
    (waiting,) = trials(sweep, "waiting")
    assert sweep.trial(waiting.number).spec.exists()
    other = FakeHost(sweep, 1)
    assert other.play(1.0) == waiting.number
    assert "have been started" in other.hear()["why"]
    assert read(sweep).trials[waiting.number].params == waiting.params
    host.trial(running).log(10, loss=2.0)
    host.ended(running, "completed")
    assert host.hear()["end"]


def test_stopping_worker_starts_no_trial_and_later_resumes_its_own(tmp_path: Path) -> None:
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


def test_trial_with_killed_supervisors_restarts_and_fails_the_fourth_time(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "sweep.max_trials=1")
    host = FakeHost(sweep)
    numbers = {host.play(None, reason="lost", decision="requeue", detail="killed by signal 9") for _ in range(4)}
    assert len(numbers) == 1
    assert host.hear()["end"]
    assert "killed by signal 9 (4 times)" in trials(sweep, "failed")[0].user_attrs["detail"]


def test_used_up_budget_stops_the_running_trial_and_keeps_its_checkpoint(
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
    assert len(checkpoint_files.committed(played.run.checkpoints)) == 1  # a larger budget can continue it


def test_budget_used_up_before_any_trial_names_the_setting_to_raise(tmp_path: Path) -> None:
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


def test_worker_requeues_if_too_little_time_is_left_for_another_trial(tmp_path: Path) -> None:
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


def test_full_disk_ends_the_tuner_with_an_error_and_loses_no_result(tmp_path: Path) -> None:
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
    again.ended(number, "completed")  # its supervisor finds that it has completed
    again.play(2.0)
    assert again.hear()["end"]
    assert [trial.values for trial in trials(sweep, "complete")] == [[1.0], [2.0]]


def test_tuner_exits_when_its_worker_process_is_gone(tmp_path: Path) -> None:
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
