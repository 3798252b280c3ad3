"""Tests of the batch step, which restarts a killed supervisor or worker, with real processes and signals."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, read_json, read_lines
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.process_identity import process_start, started_at
from hpcaccel.core.records import AttemptStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node import batch, lease
from hpcaccel.node.allocation import TAKEN_DOWN, LocalAllocation
from hpcaccel.node.sweep.worker_account import WorkerAccount, record_killed
from hpcaccel.sweeps.compute_account import ComputeAccount

from .conftest import ROOT, LocalRun, outcome
from .sweeping import CONTINUES, STOPS_AND_GOES_ON, Sweep, pid_in
from .test_supervisor import HEAD, STOPS_WHEN_ASKED

Make = Callable[..., LocalRun]

LEAVES_A_PROCESS = f"""
import os, signal, subprocess, sys, time
folder = os.environ["HPCACCEL_RUN_DIR"]
if os.environ["HPCACCEL_ATTEMPT"] == "1":
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    open(folder + "/child", "w").write(str(child.pid))
    print("ready", flush=True)
    time.sleep(300)
child = int(open(folder + "/child").read())
try:
    state = open(f"/proc/{{child}}/stat").read().rpartition(")")[2].split()[0]
except OSError:
    state = "X"
print("gone" if state in "XZ" else "still there", flush=True)
{outcome(step=5, resume=False, reason="completed")}
"""


def supervisor_of(run: RunDir) -> int:
    return int((read_json(run.lease) or {})["pid"])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def eventually(question: Callable[[], Any], what: str, *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_killed_supervisor_is_restarted_after_its_ranks_have_ended(local_run: Make) -> None:
    run = local_run(LEAVES_A_PROCESS)
    run.start()
    run.wait_for("ready")
    assert run.process is not None
    first = supervisor_of(run.dir)
    assert first != run.process.pid
    kill(first)
    assert run.wait() == 0, run.log
    assert run.ends == [("lost", "restart"), ("completed", "end")]
    assert run.lines("end")[0]["detail"] == (
        "the supervisor was killed before it could record the end: signal 9; restarted in the same job"
    )
    assert run.dir.rank_log(2, 0).read_text() == "gone\n"
    assert {line["job_id"] for line in run.lines("start")} == {"local-00000001"}
    assert "the supervisor was killed by signal 9; restarting it" in run.log
    assert not run.dir.lease.exists()


def test_cancel_received_by_killed_supervisor_reaches_the_next_one(local_run: Make) -> None:
    deaf = "import signal, time\nprint('ready', flush=True)\ntime.sleep(300)\n"
    run = local_run(deaf, stop_timeout_seconds=5)
    run.start()
    run.wait_for("ready")
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)  # the local backend's scancel
    eventually(run.dir.stop(1).exists, "the ranks are asked")
    kill(supervisor_of(run.dir))
    assert run.wait() == 130, run.log
    assert run.ends[-1] == ("cancelled", "end")


def supervisors_die_at_once(run: LocalRun) -> None:
    run.dir.node_program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from hpcaccel.node import batch\nfrom hpcaccel.node.__main__ import main\n"
        "batch.PAUSES_SECONDS = (0.0, 0.2)\n"
        "if sys.argv[1] == 'supervise':\n"
        f"    open({str(run.dir.path / 'starts')!r}, 'a').write('x')\n"
        "    os.kill(os.getpid(), 9)\n"
        "main()\n"
    )


def test_ended_run_keeps_its_exit_code_if_supervisors_die_at_once(local_run: Make) -> None:
    run = local_run("print('well')")
    assert run.run() == 0
    supervisors_die_at_once(run)
    assert run.run() == 0, run.log
    assert run.ends == [("completed", "end")]


def test_dying_supervisors_write_nothing_to_run_in_use_by_another_job(local_run: Make) -> None:
    run = local_run("print('ran')")
    supervisors_die_at_once(run)
    append_line(run.dir.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id="local-00000009")))
    lease.acquire(run.dir, job_id="local-00000009", restart_count=0)  # held by this process, which is alive
    assert run.run() == 2
    assert "is in use by job local-00000009" in run.log
    assert not run.ends
    assert run.dir.lease.exists()


def test_run_without_requeue_fails_if_supervisors_die_at_once(local_run: Make) -> None:
    run = local_run("print('ran')", requeue=False)
    supervisors_die_at_once(run)
    start = AttemptStart(attempt=1, time=1.0, job_id="local-00000001", restart_count=0)
    append_line(run.dir.ledger, to_dict(start))
    assert run.run() == 1
    assert run.ends == [("lost", "requeue"), ("failed", "end")]
    assert run.lines("end")[0]["detail"] == (
        "the supervisor was killed before it could record the end: the supervisor failed 3 times in a row "
        "within 60 s of its start; the last time it was killed by signal 9"
    )


def test_run_whose_supervisors_die_at_once_fails_after_one_requeue(local_run: Make) -> None:
    run = local_run("print('ran')")
    supervisors_die_at_once(run)
    assert run.run() == 1
    assert (run.dir.path / "starts").read_text() == "x" * 6  # three in each of two allocations
    assert run.ends == [("failed", "requeue"), ("failed", "end")]
    last = run.lines("end")[-1]
    assert last["error_class"] == "supervisor"
    assert "2 failures without a new checkpoint" in last["detail"]
    said = "the supervisor failed 3 times in a row within 60 s of its start; the last time it was killed by signal 9"
    assert said in run.lines("end")[0]["detail"]
    assert said in last["detail"]


def test_sigterm_during_the_pause_before_a_restart_cancels_the_run(local_run: Make) -> None:
    run = local_run("print('ran')")
    mark = run.dir.path / "died"
    run.dir.node_program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from hpcaccel.node import batch\nfrom hpcaccel.node.__main__ import main\n"
        "batch.PAUSES_SECONDS = (300.0,)\n"
        f"if sys.argv[1] == 'supervise' and not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w').close()\n"
        "    os.kill(os.getpid(), 9)\n"
        "main()\n"
    )
    run.start()
    eventually(lambda: "restarting it in 300 s" in run.log, "the pause")
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 130
    assert run.ends == [("cancelled", "end")]


def test_supervisor_that_cannot_start_counts_as_one_that_died_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(batch, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setenv(batch.MARK, "")
    why: list[str] = []
    step = batch.BatchStep(
        ["python", "node.pyz", "supervise"], script=tmp_path, give_up=lambda one: why.append(one) or 1
    )
    monkeypatch.setattr("hpcaccel.node.batch.subprocess.Popen", no_memory)
    assert step.run() == 1
    assert why == [
        "the supervisor failed 3 times in a row within 60 s of its start; the last time it could not be started: "
        "Cannot allocate memory"
    ]
    said = "the supervisor could not be started: Cannot allocate memory; restarting it"
    assert caplog.text.count(said) == 2


def test_sigterm_while_supervisor_requests_a_restart_cancels_the_run(local_run: Make) -> None:
    run = local_run(HEAD + "time.sleep(300)\n")
    scripts, asked = run.dir.path / "scripts", run.dir.path / "asked"
    run.dir.script.write_text(f"echo x >> {scripts}\n{run.dir.script.read_text()}")
    run.dir.node_program.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from hpcaccel.node.__main__ import main\n"
        f"if sys.argv[1] == 'supervise' and not os.path.exists({str(asked)!r}):\n"
        f"    open({str(asked)!r}, 'w').close()\n"
        "    os.kill(os.getppid(), 15)\n"
        "    time.sleep(0.5)\n"
        "    os._exit(86)\n"
        "main()\n"
    )
    assert run.run() == 130, run.log
    assert run.ends == [("cancelled", "end")]
    assert scripts.read_text() == "x\n"


def test_job_ends_although_its_parent_process_ignores_sigchld(local_run: Make) -> None:
    run = local_run("raise SystemExit(2)")
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp('bash', sys.argv)"
    command = [sys.executable, "-c", ignoring, str(run.dir.script)]
    environment = {**os.environ, "HPCACCEL_LOCAL_JOB": "local-00000001"}
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 2
    assert run.ends == [("failed", "end")]


def test_supervisor_ends_when_the_batch_step_is_killed(local_run: Make) -> None:
    run = local_run(HEAD + "time.sleep(300)\n")
    run.start()
    run.wait_for("ready")
    assert run.process is not None
    supervisor = supervisor_of(run.dir)
    run.process.kill()
    run.process.wait()
    eventually(lambda: process_start(supervisor) is None, "the supervisor is gone")


def test_restarted_supervisor_keeps_the_deadline_of_the_first(local_run: Make) -> None:
    program = STOPS_WHEN_ASKED.replace('"ready"', '"ready", os.environ["HPCACCEL_DEADLINE"]')
    run = local_run(program, launch={"time_limit_seconds": 600})
    run.start()
    run.wait_for("ready")
    kill(supervisor_of(run.dir))
    assert run.wait() == 0
    first, second = (run.dir.rank_log(attempt, 0).read_text() for attempt in (1, 2))
    assert first == second


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    one = Sweep(tmp_path, STOPS_AND_GOES_ON, CONTINUES.replace("NUMBERS", "(0,)"))
    one.trial(0)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.process.kill()
        one.process.wait()


def test_killed_worker_is_restarted_and_continues_its_trial(sweep: Sweep) -> None:
    sweep.start()
    rank = pid_in(sweep.wait_for(0, "ready"))
    kill(supervisor_of(sweep.worker))
    assert sweep.wait() == 0, sweep.log
    assert process_start(rank) is None
    assert sweep.ends(0) == [("lost", "requeue"), ("completed", "end")]
    assert sweep.worker_ends == [("completed", "end")]
    assert "previous process of this worker was killed by signal 9" in sweep.worker.host_log.read_text()
    starts = [line for line in sweep.account if line["event"] == "start"]
    assert [(line["job_id"], line["restart_count"]) for line in starts] == [("local-00000001_0", 0)] * 2
    account = ComputeAccount(sweep.dir).read()
    lasted = sweep.account[-1]["time"] - starts[0]["allocated_at"]
    assert account.gpu_seconds() == pytest.approx(lasted, rel=0.01)  # one allocation, counted once


def test_worker_that_dies_at_once_fails_after_one_requeue(sweep: Sweep) -> None:
    sweep.dir.node_program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from hpcaccel.node import batch\nfrom hpcaccel.node.__main__ import main\n"
        "batch.PAUSES_SECONDS = (0.0,)\n"
        "if sys.argv[1] == 'work':\n    os.kill(os.getpid(), 9)\n"
        "main()\n"
    )
    first = "import os\nprint('killed before:', os.environ.get('HPCACCEL_KILLED'))\n"
    sweep.dir.node_program.write_text(first + sweep.dir.node_program.read_text())
    assert sweep.run() == 1
    assert sweep.log.count("killed before: None") == 2 * 2  # each batch step, and its first worker
    assert sweep.worker_ends == [("failed", "requeue"), ("failed", "end")]
    assert all("signal 9" in line["detail"] for line, _ in read_lines(sweep.worker.account) if line["event"] == "end")


@pytest.mark.parametrize(("problem", "reason"), [(TAKEN_DOWN, "cancelled"), ("no answer", "failed")])
def test_killed_worker_that_cannot_requeue_ends_as_cancelled_or_failed(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, problem: str, reason: str
) -> None:
    monkeypatch.setattr(LocalAllocation, "requeue", lambda _: problem)
    assert record_killed(sweep.worker, "5 workers in a row ended") == 1
    assert sweep.worker_ends == [("failed", "requeue"), (reason, "end")]


def test_allocation_of_a_worker_begins_with_its_batch_step(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    monkeypatch.setenv(batch.MARK, f"{parent}:{process_start(parent)}:0.0")
    allocation = LocalAllocation(sweep.worker, read_launch(sweep.worker))
    line = WorkerAccount(sweep.worker).start(allocation, allocated_at=None, local=True)
    assert line.allocated_at == pytest.approx(started_at(parent), abs=1)
    assert line.pid == os.getpid()


def test_ranks_wait_for_no_import_that_their_start_does_not_need() -> None:
    def loaded(module: str) -> set[str]:
        code = f"import sys, {module}; print(*sys.modules)"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(answer.stdout.split())

    records = {"dataclasses", "hpcaccel.core.launch_spec", "hpcaccel.core.records"}
    assert loaded("hpcaccel.node.batch") & records == set()
    watching = {"hpcaccel.node.failures.classify", "hpcaccel.node.failures.hangs", "hpcaccel.node.samples"}
    assert loaded("hpcaccel.node.supervisor") & watching == set()
