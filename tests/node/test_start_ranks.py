"""Tests of how ranks are started: their environment, srun's options for their logs, and stops during the start."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.node.environment.containers import Wrapped
from hpcaccel.node.launchers import srun_ranks
from hpcaccel.node.launchers.srun_ranks import _output

from .conftest import LocalRun

Make = Callable[..., LocalRun]
Start = Callable[..., srun_ranks.SrunRanks]

SAYS = "import json, os; print(json.dumps(dict(os.environ)))"


def environment(run: LocalRun) -> dict[str, str]:
    assert run.run() == 0, run.log
    value: dict[str, str] = json.loads(run.dir.rank_log(1, 0).read_text())
    return value


def test_torchs_flight_recorder_writes_to_the_attempts_folder(local_run: Make) -> None:
    run = local_run(SAYS)
    assert environment(run)["TORCH_FR_DUMP_TEMP_FILE"] == f"{run.dir.attempt(1)}/flight_recorder_"


def test_users_own_path_of_the_flight_recorder_is_kept(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/trace_")
    assert environment(local_run(SAYS))["TORCH_FR_DUMP_TEMP_FILE"] == "/elsewhere/trace_"


@pytest.mark.parametrize(("share", "left"), [(True, {"SLURM_TRES_PER_TASK": "cpu=4"}), (False, None)])
def test_ranks_that_share_gpus_get_no_gpu_variables_of_slurm(
    local_run: Make, monkeypatch: pytest.MonkeyPatch, share: bool, left: dict[str, str] | None
) -> None:
    given = {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = environment(local_run(SAYS, launch={"share_gpus": share}))
    assert {name: seen[name] for name in given if name in seen} == (given if left is None else left)


@pytest.mark.parametrize(
    ("launch", "by_task"),
    [
        ({}, True),
        ({"launcher": "torchrun", "nodes": 1}, True),
        ({"launcher": "torchrun", "ranks_per_node": 1}, True),
        ({"launcher": "torchrun"}, False),  # task 1, of the second node, is not rank 1
    ],
)
def test_srun_writes_rank_logs_only_if_task_numbers_are_ranks(
    local_run: Make, launch: dict[str, Any], by_task: bool
) -> None:
    run = local_run("", launch={"backend": "slurm", "nodes": 2, "ranks_per_node": 4, **launch})
    options = _output(run.dir, read_launch(run.dir), 1)
    assert options == ([f"--output={run.dir.attempt(1)}/%t.log", "--open-mode=append"] if by_task else [])


SRUN = """\
#!/usr/bin/env python3
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"USR2\\n"))
os.write(1, b"ready\\n")
os.write(2, os.environ.get("MESSAGES", "").encode())
while True:
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a stand-in for srun, which is killed after the test."""
    program = tmp_path / "srun"
    program.write_text(SRUN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = []

    def start(run: LocalRun, **env: str) -> srun_ranks.SrunRanks:
        run.dir.attempt(1).mkdir(parents=True)
        wrapped = Wrapped(srun=[], command=["true"], env={**os.environ, **env})
        started.append(srun_ranks.SrunRanks(run.dir, read_launch(run.dir), wrapped, attempt=1))
        return started[-1]

    yield start
    for ranks in started:
        ranks._srun.kill()
        ranks._srun.wait()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Signals to the step. Ranks that are left after a failure get theirs at once."""
    found: list[str] = []
    monkeypatch.setattr(srun_ranks, "AFTER_FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(srun_ranks, "signal_step", lambda path, name, *, without: found.append(name) or True)
    return found


def test_a_stop_requested_before_the_tasks_have_started_is_sent_after_their_start(
    local_run: Make, start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(srun_ranks, "EARLIEST_STOP_SECONDS", (0.2, 0.5))
    run = local_run("", launch={"backend": "slurm"})
    ranks = start(run)
    printed = ""

    def poll_until(lines: int) -> None:
        nonlocal printed
        end = time.monotonic() + 60
        while printed.count("\n") < lines:
            assert ranks.poll() is None
            assert time.monotonic() < end
            printed += capfd.readouterr().out
            time.sleep(0.01)

    poll_until(1)
    ranks.request_stop()
    for _ in range(50):
        assert ranks.poll() is None
        time.sleep(0.01)
    assert capfd.readouterr().out == ""
    write_json(run.dir.attempt(1) / srun_ranks.STEP_FILE, {"job_id": "1", "step_id": "0"})
    poll_until(3)
    assert ranks._stop_at == []
    ranks.request_stop()
    poll_until(4)
    assert ranks._stop_at == []


@pytest.mark.parametrize(
    ("message", "cooperative", "failed"),
    [
        ("srun: error: n1: task 3: Killed", True, True),
        ("srun: error: n[1-2]: tasks 1,4-5: Segmentation fault (core dumped)", False, True),
        ("srun: error: n1: task 0: Out Of Memory", True, True),
        ("srun: error: n1: task 0: Exited with exit code 1", True, True),
        ("srun: error: n1: task 0: Exited with exit code 1", False, False),  # it may be how it ends after a SIGTERM
        ("srun: error: n1: task 0: Terminated", False, False),
        (f"srun: error: n1: task 0: Exited with exit code {EXIT_CONTINUED}", True, False),
        ("srun: Job step created", True, False),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", True, False),
    ],
)
def test_the_other_ranks_are_killed_soon_after_srun_reports_a_failed_one(
    local_run: Make,
    start: Start,
    sent: list[str],
    capfd: pytest.CaptureFixture[str],
    message: str,
    cooperative: bool,
    failed: bool,
) -> None:
    """Otherwise Slurm would do so, after ``KillWait``."""
    stop = "cooperative" if cooperative else "signals"
    ranks = start(local_run("", launch={"backend": "slurm", "stop": stop}), MESSAGES=f"srun: one\n{message}\nlast\n")
    printed, end = "", time.monotonic() + 60
    while "last" not in printed:
        assert ranks.poll() is None
        assert time.monotonic() < end
        printed += capfd.readouterr().err
        time.sleep(0.01)
    assert printed == f"srun: one\n{message}\nlast\n"
    for _ in range(5):
        ranks.poll()
    assert sent == (["KILL"] if failed else [])


def test_ranks_that_were_stopped_have_the_sites_time_to_end(local_run: Make, start: Start, sent: list[str]) -> None:
    """One that fails after the request does not shorten the save of the others."""
    ranks = start(local_run("", launch={"backend": "slurm"}), MESSAGES="srun: error: n1: task 3: Killed\n")
    ranks.request_stop()
    assert ranks._messages is not None
    assert select.select([ranks._messages._input], [], [], 60)[0]
    for _ in range(5):
        ranks.poll()
    assert sent == []
