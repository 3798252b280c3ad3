"""Finding the step of the ranks, and the GPUs of an allocation, by Slurm's answers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.launch import step_launch
from hpcaccel.launch.allocation import SlurmAllocation
from hpcaccel.launch.step_launch import run_step
from hpcaccel.slurm import Slurm

JOB = "JobId=7 JobName=x UserId=u(1) NumNodes=2 AllocTRES=cpu=8,mem=8G,node=2,billing=8,gres/gpu=6,gres/gpu:a100=6"


def answering(stdout: str) -> Callable[..., Any]:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout, "")

    return run


def test_step_is_found_by_its_name() -> None:
    slurm = Slurm(answering("7.batch|batch\n7.0|other\n7.12|hpcaccel-launch-1\n"))
    assert slurm.step_named("7", "hpcaccel-launch-1") == "12"
    assert slurm.step_named("7", "hpcaccel-launch-2") is None


def test_record_of_a_job() -> None:
    assert Slurm(answering(JOB)).job_record("7")["AllocTRES"].endswith("gres/gpu:a100=6")
    assert Slurm(answering("")).job_record("7") == {}


def test_shell_of_salloc_asks_slurm_for_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a login node, Slurm sets no variable with the number of GPUs, if they were requested by --gres."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/bash\necho '{JOB}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert SlurmAllocation.of(variables) == SlurmAllocation("7", ["n1", "n2"], cpus=4, gpus=3)


@pytest.mark.parametrize(("line", "code"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_exit_code_of_srun(line: str, code: int) -> None:
    assert run_step(["bash", "-c", line], {"PATH": "/bin:/usr/bin"}, job_id="7", name="x") == code


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a stand-in for srun, with SIGTERM for this thread as soon as it is up. Returns its exit code."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(step_launch, "_PAUSE_SECONDS", 0.05)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in the thread, too: run_step takes the signal

    def terminate(thread: int) -> None:
        end = time.monotonic() + 20
        while not (tmp_path / "up").exists() and time.monotonic() < end:
            time.sleep(0.02)
        # Not to the process: another thread of the tests, in which the signal is not blocked, could take it.
        signal.pthread_kill(thread, signal.SIGTERM)

    def run(squeue: str, scancel: str = "") -> int:
        for name, script in (("squeue", squeue), ("scancel", scancel)):
            (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{script}\n")
            (tmp_path / name).chmod(0o755)
        thread = threading.Thread(target=terminate, args=(threading.get_ident(),))
        thread.start()
        line = f"cd {tmp_path}; trap 'exit 85' TERM; touch up; for i in {{1..200}}; do "
        line += "[ -e saved ] && exit 0; sleep 0.05; done"
        try:
            return run_step(["bash", "-c", line], dict(os.environ), job_id="7", name="ours")
        finally:
            thread.join()

    yield run
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_signal_is_sent_again_until_slurm_responds(srun: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """srun must not get SIGTERM meanwhile: it would kill ranks that are to save."""
    flaky = "echo x >> asked; [ $(wc -l < asked) -lt 3 ] && { echo 'error: timed out' >&2; exit 1; }; echo '7.0|ours'"
    assert srun(flaky, "touch saved") == 0
    assert "cannot send SIGTERM to the ranks" in capfd.readouterr().err


def test_srun_is_terminated_if_the_ranks_have_not_begun(srun: Callable[..., int]) -> None:
    assert srun("echo '7.batch|batch'") == 85


def test_srun_is_terminated_if_slurm_does_not_respond_in_time(
    srun: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_launch, "_RETRY_SECONDS", 0.2)
    assert srun("echo x >> asked; echo 'squeue: error: timed out' >&2; exit 1") == 85
