"""Tests of a sweep's worker on the local backend, with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.node import rank
from hpcaccel.node.allocation import Slot

from .sweeping import CONTINUES, IN_TURN, STOPS_AND_GOES_ON, Sweep, is_gone, pid_in

Make = Callable[..., Sweep]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Make]:
    made: list[Sweep] = []

    def make(*args: object, trials: int = 1, **kwargs: object) -> Sweep:
        sweep = Sweep(tmp_path, *args, **kwargs)  # type: ignore[arg-type]
        made.append(sweep)
        for number in range(trials):
            sweep.trial(number)
        return sweep

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_worker_runs_one_trial_after_another(sweep: Make) -> None:
    two = sweep("print('hello')", IN_TURN.format(count=2), trials=2)
    assert two.run() == 0
    assert [two.ends(number) for number in (0, 1)] == [[("completed", "end")]] * 2
    assert two.dir.trial(1).rank_log(1, 0).read_text() == "hello\n"
    hello, *ends = two.heard
    assert (hello["event"], hello["worker"], hello["slots"]) == ("hello", 0, 1)
    assert [(end["trial"], end["reason"], end["decision"]) for end in ends] == [
        (0, "completed", "end"), (1, "completed", "end")
    ]  # fmt: skip
    assert two.worker_ends == [("completed", "end")]
    assert "that was all" in two.account[-1]["detail"]
    assert [line.get("trial") for line in two.account if line.get("what") == "started"] == [0, 1]
    assert two.account[0]["job_id"] == "local-00000001_0"
    assert (read_json(two.dir.trial(0).record) or {})["job_ids"] == ["local-00000001_0"]
    assert not two.worker.lease.exists()
    assert not two.dir.trial(0).lease.exists()


def test_crashed_trial_and_missing_trial_directory_are_reported_as_failed(sweep: Make) -> None:
    bad = sweep("import argparse; argparse.ArgumentParser().parse_args(['--nope'])", IN_TURN.format(count=2))
    assert bad.run() == 0
    _, first, second = bad.heard
    assert (first["reason"], first["decision"], first["error_class"]) == ("failed", "end", "user_mistake")
    assert (second["reason"], second["decision"], second["error_class"]) == ("failed", "end", "refused")
    assert "trials/1" in second["detail"]


def test_failed_trial_can_be_retried_in_the_same_allocation(sweep: Make) -> None:
    program = "import os; assert int(os.environ['HPCACCEL_ATTEMPT']) > 2, 'not yet'"
    again = "for _ in range(2):\n    say(run=0, slot=0)\n    hear()\nsay(run=0, slot=0)\nhear()\nsay(end=True, why='')"
    one = sweep(program, again)
    assert one.run() == 0
    assert one.ends(0) == [("failed", "restart"), ("failed", "end"), ("completed", "end")]
    # The chooser requests the completed trial again: nothing runs, and its end is reported again.
    assert [(event["reason"], event["decision"]) for event in one.heard[1:]] == [
        ("failed", "end"), ("completed", "end"), ("completed", "end")
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_signal_of_the_scheduler_stops_every_trial(sweep: Make, number: signal.Signals) -> None:
    chooser = "say(run=0, slot=0)\nsay(run=1, slot=1)\nwhile hear():\n    pass" if number == signal.SIGTERM else (
        "if hello['restart_count']:\n    say(end=True, why='')\n    sys.exit()\n"
        "say(run=0, slot=0)\nsay(run=1, slot=1)\nwhile hear():\n    pass"
    )  # fmt: skip
    two = sweep(STOPS_AND_GOES_ON, chooser, trials=2, pack=2)
    two.start()
    for trial in (0, 1):
        two.wait_for(trial, "ready")
    two.signal(number)
    code = two.wait()
    stopping = [event for event in two.heard if event["event"] == "stopping"]
    assert len(stopping) == 1
    if number == signal.SIGTERM:  # this backend's scancel
        assert code == 130
        assert two.worker_ends == [("cancelled", "end")]
        assert [two.ends(trial) for trial in (0, 1)] == [[("cancelled", "requeue")]] * 2
    else:
        assert code == 0
        assert two.worker_ends == [("time_limit", "requeue"), ("completed", "end")]
        assert [line["restart_count"] for line in two.account if line["event"] == "start"] == [0, 1]
        assert [two.ends(trial) for trial in (0, 1)] == [[("time_limit", "requeue")]] * 2


def test_worker_continues_the_same_trial_after_its_time_limit(sweep: Make) -> None:
    chooser = CONTINUES.replace("NUMBERS", "(0,)")
    one = sweep(STOPS_AND_GOES_ON, chooser, time_limit_seconds=14, resilience={"warning_seconds": 4})
    assert one.run() == 0
    assert one.ends(0) == [("time_limit", "requeue"), ("completed", "end")]
    assert one.worker_ends == [("time_limit", "requeue"), ("completed", "end")]
    hellos = [event for event in one.heard if event["event"] == "hello"]
    assert hellos[1]["end_time"] > hellos[0]["end_time"]


def test_paused_sweep_stays_paused_until_it_is_resumed(sweep: Make) -> None:
    one = sweep(STOPS_AND_GOES_ON, CONTINUES.replace("NUMBERS", "(0,)"))
    one.start()
    one.wait_for(0, "ready")
    one.ask(one.dir, "pause")
    assert one.wait() == 85
    assert (one.ends(0), one.worker_ends) == ([("stop", "pause")], [("stop", "pause")])
    one.start(job_id="local-00000002_0")  # a job that was still in the queue
    assert one.wait() == 85
    assert len(one.ends(0)) == 1
    (one.dir.control / "stop-1.json").unlink()
    one.start(job_id="local-00000003_0")
    assert one.wait() == 0
    assert one.ends(0) == [("stop", "pause"), ("completed", "end")]


def test_request_to_one_worker_is_honoured_once(sweep: Make) -> None:
    one = sweep("print('ran')", IN_TURN.format(count=1))
    one.ask(one.worker, "cancel", reason="cancelled")
    assert one.run() == 130
    assert one.worker_ends == [("cancelled", "end")]
    assert not one.dir.trial(0).ledger.exists()
    assert one.run() == 0


def test_trial_continues_while_the_chooser_is_restarted(sweep: Make) -> None:
    chooser = """
        if hello["running"]:
            say(run=0, slot=0)
            open(f"{folder}/again", "w").close()
            hear()
            say(end=True, why="")
        else:
            say(run=0, slot=0)
            while not os.path.exists(f"{folder}/crash"):
                time.sleep(0.02)
            os.kill(os.getpid(), 9)
    """
    program = "import os, time\nprint('ready', os.getpid(), flush=True)\n"
    program += "while not os.path.exists(os.environ['HPCACCEL_RUN_DIR'] + '/go'):\n    time.sleep(0.02)"
    one = sweep(program, chooser)
    one.start()
    one.wait_for(0, "ready")
    (one.dir.path / "crash").touch()
    one.until((one.dir.path / "again").exists, "a second chooser")
    (one.dir.trial(0).path / "go").touch()
    assert one.wait() == 0
    assert one.ends(0) == [("completed", "end")]
    assert [event["event"] for event in one.heard] == ["hello", "hello", "ended"]
    assert one.heard[1]["running"] == {"0": 0}


def test_chooser_that_keeps_crashing_fails_the_worker_with_its_error(sweep: Make) -> None:
    one = sweep(STOPS_AND_GOES_ON, "say(run=0, slot=0)\ntime.sleep(0.5)\nraise SystemExit('hpcaccel: no such sampler')")
    assert one.run() == 1
    assert one.worker_ends == [("failed", "end")]
    assert "died (code 1): no such sampler; see" in one.account[-1]["detail"]
    assert "3 times without a trial ending in between" in one.account[-1]["detail"]
    assert one.worker.host_log.read_text().count("hpcaccel: no such sampler") == 3
    assert one.ends(0) == [("stop", "requeue")]


@pytest.mark.parametrize("victim", ["host", "trial"])
def test_child_processes_end_when_their_parent_is_killed(sweep: Make, victim: str) -> None:
    one = sweep(
        STOPS_AND_GOES_ON,
        "open(f'{folder}/chooser', 'w').write(str(os.getpid()))\n" + CONTINUES.replace("NUMBERS", "(0,)"),
    )
    one.start()
    rank = pid_in(one.wait_for(0, "ready"))
    supervisor = (read_json(one.dir.trial(0).lease) or {})["pid"]
    chooser = int((one.dir.path / "chooser").read_text())
    if victim == "host":
        one.signal(signal.SIGKILL)
        one.wait()
        one.until(lambda: all(is_gone(pid) for pid in (rank, supervisor, chooser)), "all are gone")
        one.start()
        assert one.wait() == 0
        assert one.ends(0) == [("lost", "requeue"), ("completed", "end")]
        assert [line["event"] for line in one.account if line["event"] != "seen"] == ["start", "start", "end"]
    else:
        os.kill(supervisor, signal.SIGKILL)
        one.until(lambda: is_gone(rank), "the rank is gone")
        one.until(lambda: one.heard[1:], "the chooser is told")
        assert (one.heard[1]["reason"], one.heard[1]["decision"]) == ("lost", "requeue")
        assert one.wait() == 0


def test_trial_stopped_before_its_ranks_start_is_requeued(sweep: Make) -> None:
    one = sweep("print('ran')", "")
    trial = one.dir.trial(0)
    one.ask(trial, "requeue", name="worker")
    report, report_to = os.pipe()
    order = json.dumps({"run": str(trial.path), "slot": "0/1", "env": {}}) + "\n"
    command = [sys.executable, str(trial.node_program), "trial", str(report_to)]
    done = subprocess.run(command, input=order.encode(), pass_fds=[report_to], check=False)
    os.close(report_to)
    with os.fdopen(report) as word:
        assert json.load(word)["detail"] == "requested before the ranks started"
    assert done.returncode == 85
    assert one.ends(0) == [("stop", "requeue")]
    assert not trial.attempt(1).exists()


def test_failed_setup_ends_the_worker(sweep: Make) -> None:
    one = sweep("print('ran')", IN_TURN.format(count=1))
    one.dir.script.write_text(
        one.dir.script.read_text()
        .replace(" batch work ", " setup-failed ")
        .replace(" 0\n", "/workers/0 7 'environment.setup: module load x'\n")
    )
    assert one.run() == 1
    assert one.worker_ends == [("failed", "end")]
    assert "module load x failed with exit code 7" in one.account[-1]["detail"]


def test_slots_share_gpus_and_cores() -> None:
    halves = [Slot(number=number, of=2) for number in (0, 1)]
    assert [half.visible(["4", "5", "6", "7"]) for half in halves] == [["4", "5"], ["6", "7"]]
    assert [half.visible(["3"]) for half in halves] == [["3"], ["3"]]
    local = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert [half.environment(local, local=True) for half in halves] == [
        {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
    ]  # fmt: skip
    slurm = {"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "8000", "SLURM_GPUS_ON_NODE": "4"}
    assert halves[0].srun_options(slurm, ranks_per_node=2) == [
        "--exact", "--cpus-per-task=4", "--mem=4000M", "--gpus-per-node=2"
    ]  # fmt: skip
    assert Slot(number=0, of=3).srun_options(slurm, ranks_per_node=1)[0] == "--overlap"
    assert Slot(number=0, of=1).srun_options(slurm, ranks_per_node=2) == []


def test_slot_gets_its_part_of_the_gpus_of_any_vendor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def restricted(**env: str) -> dict[str, str]:
        rank._restrict_gpus(env, Slot(number=1, of=2))
        return env

    monkeypatch.setattr(rank, "AMD_DRIVER", tmp_path / "kfd")
    listed = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "0,1,2,3"}
    assert restricted(**listed) == dict.fromkeys(listed, "2,3")
    assert restricted(ZE_AFFINITY_MASK="0,1") == {"ZE_AFFINITY_MASK": "1"}
    (tmp_path / "kfd").touch()
    # HIP reads CUDA_VISIBLE_DEVICES as numbers among those of ROCR_VISIBLE_DEVICES.
    assert restricted(**listed) == {"ROCR_VISIBLE_DEVICES": "2,3"}


NO_RESTART = {"warm_restart": "auto", "restart_in_place": 0, "requeue": False}
SAYS_PARENT = """
import json, os, sys, time
folder = os.environ["HPCACCEL_RUN_DIR"]
attempt = f"{folder}/attempts/{os.environ['HPCACCEL_ATTEMPT']}"
value = {"parent": os.getppid(), "folder": folder, "known": "known" in sys.modules, "argument": sys.argv[1]}
with open(f"{attempt}/imports.json", "w") as file:
    origin = os.path.join(os.path.dirname(__file__), "known.py")
    json.dump({"modules": ["known"], "origins": {"known": origin}, "changed": []}, file)
end = time.monotonic() + 60
while not value["known"] and "warm parents have imported" not in open(f"{attempt}/supervisor.log").read():
    assert time.monotonic() < end
    time.sleep(0.1)
print(json.dumps(value), flush=True)
if sys.argv[1] == "1":
    raise ValueError
"""


def test_trials_start_below_the_warm_parents_of_the_trial_before(sweep: Make) -> None:
    one = sweep(SAYS_PARENT, IN_TURN.format(count=3), resilience=NO_RESTART, trials=0)
    (one.dir.path / "known.py").touch()
    said = []
    for number in range(3):
        one.document["launch"]["program"] = ["{python}", str(one.dir.path / "program.py"), str(number)]
        one.trial(number)
    assert one.run() == 0, one.log
    for number in range(3):
        run = one.dir.trial(number)
        said.append(json.loads(run.rank_log(1, 0).read_text().splitlines()[0]))
        assert (said[-1]["folder"], said[-1]["argument"]) == (str(run.path), str(number))
    assert [value["known"] for value in said] == [False, True, True]
    assert len({value["parent"] for value in said}) == 1
    assert is_gone(said[0]["parent"])
    ends = [event for event in one.heard if event["event"] == "ended"]
    assert [event["reason"] for event in ends] == ["completed", "failed", "completed"]


def test_trial_with_another_launch_gets_parents_of_its_own(sweep: Make) -> None:
    one = sweep(SAYS_PARENT, IN_TURN.format(count=2), resilience=NO_RESTART, trials=0)
    (one.dir.path / "known.py").touch()
    for number, folders in enumerate([[], ["/some/where"]]):
        one.document["launch"]["program"] = ["{python}", str(one.dir.path / "program.py"), "0"]
        one.document["launch"]["pythonpath"] = folders
        one.trial(number)
    assert one.run() == 0, one.log
    said = [json.loads(one.dir.trial(number).rank_log(1, 0).read_text()) for number in range(2)]
    assert said[0]["parent"] != said[1]["parent"]
    assert [value["known"] for value in said] == [False, False]
