"""Programs without an Accelerator stop at one step on all ranks, through ``hpcaccel.stop_gate``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from tests.runtime.ranks import Ranks, make_run, outcome, request_stop, run_ranks


def gate_ranks(tmp_path: Path, run: RunDir, *arguments: str, size: int = 2, attempt: int = 1) -> Any:
    folder = tmp_path / "saved"
    folder.mkdir(exist_ok=True)
    arguments = ("--folder", str(folder), *arguments)
    return run_ranks("gate.py", arguments, size=size, run=run, attempt=attempt, blocked=True)


def request(run: RunDir, **fields: Any) -> None:
    request_stop(run, **{"reason": "stop", **fields})


@pytest.mark.torch
@pytest.mark.parametrize("group", ["before", "after"])
def test_all_ranks_leave_at_one_step_and_continue(tmp_path: Path, group: str) -> None:
    run = make_run(tmp_path / "run")
    request(run, reason="preempted")
    stopped = gate_ranks(tmp_path, run, "--kill", "1:7", "--group", group)
    assert stopped.codes == [85, 85], stopped.outputs
    step = stopped.result()["step"]
    assert 7 <= step <= 9
    assert f'"step": {step}, "reason": "preempted"' in stopped.outputs[1]
    path = tmp_path / "saved" / f"{step}.pt"
    found = outcome(run) or {}
    assert (found["reason"], found["resume"]) == ("preempted", True)
    assert (found["step"], found["checkpoint"]) == (step, str(path))
    resumed = gate_ranks(tmp_path, run, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == {"step": 40, "end": True}
    assert (outcome(run, 2) or {})["reason"] == "completed"
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["resumed_from"], progress["total_steps"]) == (step, str(path), 40)


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.parametrize("seed", range(10))
def test_sigterm_to_any_rank_at_any_moment_stops_all_ranks_at_one_step(tmp_path: Path, seed: int) -> None:
    """20 trainings for each seed, each of 4 ranks with 2 loader workers."""
    random = Random(seed)
    for number in range(20):
        run = make_run(tmp_path / f"run{number}")
        request(run)
        folder = tmp_path / f"saved{number}"
        folder.mkdir()
        arguments = ["--folder", str(folder), "--workers", "2", "--pause", "0.005", "--steps", "1000"]
        ranks = Ranks("gate.py", *arguments, size=4, run=run, blocked=True)
        time.sleep(random.uniform(0.0, 4.0))
        os.kill(random.choice(ranks.processes).pid, signal.SIGTERM)
        ended = ranks.wait()
        assert ended.codes == [85] * 4, ended.outputs
        steps = {line for output in ended.outputs for line in output.splitlines() if line.startswith('{"step"')}
        assert len(steps) == 1, ended.outputs
        assert [path.stem for path in folder.iterdir()] == [str(json.loads(steps.pop())["step"])]


@pytest.mark.torch
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loader_workers_survive_a_sigterm_to_all_processes(
    tmp_path: Path, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # for wait_for_children
    run = make_run(tmp_path / "run")
    request(run)
    folder = tmp_path / "saved"
    folder.mkdir()
    arguments = ["--folder", str(folder), "--workers", "2", "--context", context, "--pause", "0.05", "--steps", "900"]
    ranks = Ranks("gate.py", *arguments, size=1, run=run, blocked=True, fresh=True)
    wait_for_children(ranks, 2)
    time.sleep(0.5)
    os.killpg(ranks.processes[0].pid, signal.SIGTERM)
    ended = ranks.wait()
    assert ended.codes == [85], ended.outputs
    assert "exited unexpectedly" not in ended.outputs[0]
    assert len(list(folder.iterdir())) == 1


def wait_for_children(ranks: Ranks, count: int) -> None:
    """Wait until the only rank has so many children. After two minutes, its stacks and its output are an error."""
    pid = ranks.processes[0].pid
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        found = subprocess.run(["pgrep", "-g", str(pid)], capture_output=True, text=True, check=False).stdout.split()
        if len(found) > count:
            return
        time.sleep(0.1)
    state = subprocess.run(["ps", "-eo", "pgid,pid,stat,wchan:20,args"], capture_output=True, text=True, check=False)
    group = [line for line in state.stdout.splitlines() if line.split()[0] == str(pid)]
    os.killpg(pid, signal.SIGABRT)
    raise AssertionError(f"the loader has started no workers: {group}\n{ranks.wait().outputs}")


@pytest.mark.torch
def test_run_that_is_to_finish_leaves_its_loop_and_completes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request(run, then="finish")
    ended = gate_ranks(tmp_path, run, "--kill", "0:5", "--finish")
    assert ended.codes == [0, 0], ended.outputs
    assert ended.result()["end"]
    found = outcome(run) or {}
    assert (found["reason"], found["resume"]) == ("completed", False)
    assert found["step"] == ended.result()["step"] < 40


@pytest.mark.torch
def test_leave_at_the_end_for_good_exits_with_0(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request(run, then="finish")
    ended = gate_ranks(tmp_path, run, "--kill", "0:5")
    assert ended.codes == [0, 0], ended.outputs
    assert (outcome(run) or {})["reason"] == "completed"


@pytest.mark.torch
def test_program_that_ends_by_itself_after_a_stop_is_not_completed(tmp_path: Path) -> None:
    """It may have saved in its own way, so the run is continued; if it had finished, its next start finds that out."""
    run = make_run(tmp_path / "run")
    request(run, reason="time_limit")
    ended = gate_ranks(tmp_path, run, "--kill", "0:5", "--ignore")
    assert ended.codes == [0, 0], ended.outputs
    found = outcome(run) or {}
    assert (found["reason"], found["resume"], found["checkpoint"]) == ("time_limit", True, None)


def alone(program: str, run: RunDir | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of one process with the signals blocked, as the shim does."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
    if run is not None:
        environ |= {"HPCACCEL_RUN_DIR": str(run.path), "HPCACCEL_ATTEMPT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})\n"
    return subprocess.run(
        [sys.executable, "-c", (block if run is not None else "") + program],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LOOP = """
import os, signal, sys
import hpcaccel
gate = hpcaccel.stop_gate()
for step in range(1, 100):
    if step == 5:
        os.kill(os.getpid(), signal.SIGUSR2)
    if gate.step(step):
        print(step, gate.reason, gate.seconds_left, gate.in_time, "torch" in sys.modules)
        open("saved", "w").close()
        gate.leave(checkpoint="saved")
"""


@pytest.mark.parametrize("in_run", [True, False])
def test_one_process_without_torch_stops_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_run: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run") if in_run else None
    if run is not None:
        request(run, reason="preempted", deadline=time.time() + 50)
    ended = alone(LOOP, run)
    assert ended.returncode == 85, ended.stderr
    words = ended.stdout.split()
    if run is None:
        assert words[:5] == ["5", "stop", "None", "True", "False"]
    else:
        assert words[:2] == ["5", "preempted"]
        assert 0 < float(words[2]) <= 50
        assert words[3:5] == ["True", "False"]
        assert (outcome(run) or {})["checkpoint"] == str(tmp_path / "saved")
        assert (read_json(run.timing(1)) or {})["last_step"] == 5


def test_save_that_does_not_fit_into_the_time_left_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request(run, reason="preempted", deadline=time.time() + 1)
    ended = alone(
        """
import hpcaccel, time, os, signal
from hpcaccel.runtime.training.process_exit import LONG_SAVE_SECONDS
gate = hpcaccel.stop_gate()
gate.step(1)
gate.phase = "saving"
time.sleep(1.5)
gate.step(2)
os.kill(os.getpid(), signal.SIGTERM)
assert gate.step(3)
print(gate.in_time)
gate.leave()
""",
        run,
    )
    assert ended.returncode == 143, ended.stderr
    assert ended.stdout.splitlines()[0] == "False"
    assert (outcome(run) or {})["checkpoint"] is None
    assert (read_json(run.timing(1)) or {})["slowest_save_seconds"] >= 1.5


def test_checkpoint_that_does_not_exist_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request(run)
    ended = alone(LOOP.replace('open("saved", "w").close()', ""), run)
    assert ended.returncode == 143, ended.stderr
    assert "there is no such file" in ended.stderr
    assert (outcome(run) or {})["checkpoint"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gate.leave()", "no stop was requested"),
        ("gate.phase = 'thinking'", "phase='thinking' is not a phase"),
        (
            "import hpcaccel.runtime.training_session as s; s._current = 1; hpcaccel.Accelerator; "
            "s.TrainingSession.existing = classmethod(lambda cls: 1); m._gate = None; hpcaccel.stop_gate()",
            "this process has an Accelerator",
        ),
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(tmp_path: Path, line: str, message: str) -> None:
    program = f"import hpcaccel\nimport hpcaccel.runtime.training.stop_gate as m\ngate = hpcaccel.stop_gate()\n{line}\n"
    ended = alone(program)
    assert ended.returncode != 0
    assert f"RuntimeMisuse: {message}" in ended.stderr or message in ended.stderr.splitlines()[-1]


def test_child_processes_ignore_the_signals_and_obey_terminate(tmp_path: Path) -> None:
    ended = alone(
        """
import hpcaccel, multiprocessing, os, signal, time
gate = hpcaccel.stop_gate()
for method in ("fork", "spawn", "forkserver"):
    child = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.3 if method == "fork" else 1.0)
    os.kill(child.pid, signal.SIGTERM)
    child.join(0.5)
    assert child.is_alive(), method
    child.terminate()
    child.join(10)
    assert not child.is_alive(), method
print("done")
""",
        make_run(tmp_path / "run"),
    )
    assert ended.stdout == "done\n", ended.stderr
